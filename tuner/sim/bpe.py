"""A small byte-level BPE of our own: the tokenizer of the tiny model, and of the simulated engine.

Learned at import from the few sentences below, so that it needs no file and no library, and is the same
everywhere. Any text round-trips: a byte without a merge is a token of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Final

BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
SPECIALS: Final = (BEGIN, END, "<|pad|>")
MERGES: Final = 700

_CORPUS: Final = """
The prefix cache keeps the blocks of a shared system prompt, so that the next request starts where the last one
stopped. A chunk is the share of a long prompt that one step of the engine computes. When the chunk is small, the
step is short and the tokens of other requests keep flowing; when it is large, the prompt is done in fewer steps.
You are a helpful assistant. Answer the question of the user in a few clear sentences, and say so when you do not
know the answer. Please summarize the following document for a reader who has little time and wants the numbers.
What is the capital of the country, how many people live there, and which river runs through it? Write a short
function that takes a list of numbers and returns their median; explain each line. The quick brown fox jumps over
the lazy dog while the engineers measure the latency of the first token under load. Every morning the city wakes
before the sun does: trucks bring bread and milk, the first trams ring their bells, and the cleaners go home. She
had always wanted to see the sea, and when she did she said nothing for a long while. In the second quarter the
revenue grew by twelve percent, the costs by nine, and the number of customers by more than a third. Dear team,
thank you for your message; we will look into this and come back to you within two working days. The patient was
asked to take the medicine twice a day after meals, with water, for at least one week. There are three reasons for
this decision: the price, the quality, and the time that it would take to build another one. If the temperature
is above the limit, then the system should send a warning and reduce the power until the value is normal again.
Can you tell me more about how this works? Yes, of course. First, the server receives the request and checks it.
Then the scheduler puts it into a queue, where it waits until there is enough memory for its blocks. After that the
model reads the prompt, and the answer is written token by token, from left to right, until it ends. for each item
in the list, do the following: open the file, read the lines, count the words, and close it. def main(): return 0
"""

_PIECE: Final = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def _byte_letters() -> list[str]:
    """A printable character for each byte, as byte-level BPE files write them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [""] * 256
    spare = 0x100
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(spare)
            spare += 1
    return letters


LETTERS: Final = _byte_letters()
_BYTES: Final = {letter: byte for byte, letter in enumerate(LETTERS)}


def _spell(piece: str) -> tuple[str, ...]:
    return tuple(LETTERS[b] for b in piece.encode())


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


@lru_cache(maxsize=1)
def merges() -> tuple[tuple[str, str], ...]:
    """The learned merges, best first; ties are broken by spelling, so that they are the same everywhere."""
    words = Counter(_spell(piece) for piece in _PIECE.findall(_CORPUS.replace("\n", " ")))
    learned: list[tuple[str, str]] = []
    while len(learned) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        learned.append(best)
        words = Counter({_join(word, best): count for word, count in words.items()})
    return tuple(learned)


@lru_cache(maxsize=1)
def vocabulary() -> dict[str, int]:
    """Token spelling to id: the specials, the 256 bytes, then one token for each merge."""
    tokens = [*SPECIALS, *LETTERS]
    seen = set(tokens)
    for left, right in merges():
        if left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
    return {token: index for index, token in enumerate(tokens)}


@lru_cache(maxsize=1)
def _ranks() -> dict[tuple[str, str], int]:
    return {pair: rank for rank, pair in enumerate(merges())}


@lru_cache(maxsize=1)
def _spellings() -> list[bytes]:
    return [
        token.encode() if token in SPECIALS else bytes(_BYTES[letter] for letter in token) for token in vocabulary()
    ]


@lru_cache(maxsize=65536)
def _piece_ids(piece: str) -> tuple[int, ...]:
    word = _spell(piece)
    ranks = _ranks()
    while len(word) > 1:
        best = min(pairwise(word), key=lambda p: ranks.get(p, MERGES))
        if best not in ranks:
            break
        word = _join(word, best)
    ids = vocabulary()
    return tuple(ids[token] for token in word)


def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of `text`, with the begin token in front unless told otherwise."""
    out = [0] if add_special_tokens else []
    for piece in _PIECE.findall(text):
        out.extend(_piece_ids(piece))
    return out


def decode(ids: list[int]) -> str:
    """The text of token ids; specials are left out, ids outside the vocabulary read as `?`."""
    table = _spellings()
    raw = b"".join(table[i] if i < len(table) else b"?" for i in ids if i >= len(SPECIALS))
    return raw.decode(errors="replace")
