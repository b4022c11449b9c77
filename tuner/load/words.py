"""Common words; nearly every tokenizer has a token of its own for each with a space before it."""

from __future__ import annotations

from typing import Final

OPENING: Final = "The"
"""Every text begins with it: how a first word is cut depends on what stands before it."""

_LIST: Final = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city name team minute idea body information
    back parent face others level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education foot boy age policy music market sense nation plan
    good new first last long great little own other old big high different small large next early young
    important few public bad same able time about after again all also any because before between both but
    can come could day do even find from get give go have here how in into its just know like look make
    many may more most much must no not now of on only or out over see should so some such take than that
    the their them then there these they think this through to two under up use very want was we well were
    what when where which while who will with would you your answer when prompt block cache engine token
    latency memory next request server step model reader short text number small large
"""

WORDS: Final = tuple(dict.fromkeys(_LIST.split()))
