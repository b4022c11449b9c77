"""Our client and its peers against a server with known latencies.

    python benchmarks/ruler.py [--concurrency 8 64 256] [--itl 5 20] [--only NAME ...] [--install] [--quick] [--json]

The server (ruler/known_server.c, one epoll loop) gives the first token 50 ms after a request arrived and one every
ITL after it, 16 in all; it is pinned to core 1, each client to core 0. Columns:

- rate: requests a second by the server's own clock, as a share of the ideal, concurrency / (50 ms + 15 ITL).
- flight: the server's mean count of requests in flight, as a share of what was asked for: the judge of who was limited.
- late: how late the server itself sent its tokens (P99, ms): above a few, the machine is busy and the row says little.
- TTFT P50, P99: what the client says, ms; the truth is 50.
- CPU: CPU seconds a thousand requests, of the client and its children. Each client runs twice, with few and with
  many requests, and the difference counts: starting up and writing reports do not.
- limited: whether chunktune itself said that it was the limit.

The last part makes chunktune's client slow on purpose (somebody holds its event loop for a share of the time) and
checks that every round in which the server saw too few requests in flight was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ruler"))

import peers  # noqa: E402
from peers import Peer, Said  # noqa: E402

TTFT_MS = 50.0
RUN_TIMEOUT_S = 300.0
STARVED = 0.90
"""Below this share of the asked concurrency in flight at the server, the client was the limit."""


@dataclass(frozen=True)
class Row:
    client: str
    itl_ms: float
    concurrency: int
    requests: int
    rate_share: float
    in_flight_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_s_per_1000: float
    failed: int
    limited: str | None
    server_late_p99_ms: float


def build(folder: Path) -> tuple[Path, Path]:
    """The server and the floor client."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("ruler.py needs a C compiler (cc or gcc)")
    built = []
    for name in ("known_server", "floor_client"):
        target = folder / name
        subprocess.run([compiler, "-O2", "-o", str(target), str(HERE / "ruler" / f"{name}.c")], check=True)
        built.append(target)
    return built[0], built[1]


def pinned(core: int) -> list[str]:
    """A prefix that pins a command to a core; nothing where there is only one, or no taskset."""
    return ["taskset", "-c", str(core)] if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else []


@contextmanager
def server(binary: Path, itl_ms: float) -> Iterator[str]:
    command = [*pinned(1), str(binary), "0", str(TTFT_MS), str(itl_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def ask(url: str, path: str) -> bytes:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url + path, timeout=30) as reply:
        data: bytes = reply.read()
        return data


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Run:
    said: Said
    cpu_s: float
    in_flight_share: float
    rate: float
    served: int
    late_p99_ms: float


def run_once(peer: Peer, url: str, concurrency: int, requests: int) -> Run:
    """One run of a client; RuntimeError with its last lines when it fails."""
    ask(url, "/__reset")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*pinned(0), *peer.command(url, concurrency, requests, folder)]
        before_s = children_cpu_s()
        try:
            done = subprocess.run(
                command, cwd=folder, env=peers.environment(), capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end within {RUN_TIMEOUT_S:g} s") from None
        cpu_s = children_cpu_s() - before_s
        if done.returncode:
            raise RuntimeError(" | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])[-400:])
        said = peer.read(folder, done.stdout)
    stats = json.loads(ask(url, "/__stats"))
    records = stats["records"][-requests:]
    begun, ended = min(r[0] for r in records), max(r[2] for r in records)
    in_flight = sum(r[2] - r[0] for r in records) / (ended - begun)
    return Run(said, cpu_s, in_flight / concurrency, len(records) / (ended - begun), len(records), stats["late_p99_ms"])


def measure(peer: Peer, url: str, itl_ms: float, concurrency: int, turns: int) -> Row:
    turns = max(4, turns // 3) if peer.slow and concurrency > 8 else turns
    few, many = concurrency * 2, max(concurrency * turns, 20 * turns)
    small = run_once(peer, url, concurrency, few)
    large = run_once(peer, url, concurrency, many)
    cpu = (large.cpu_s - small.cpu_s) / (large.served - small.served) * 1000
    ideal = concurrency / ((TTFT_MS + (peers.OUTPUT_TOKENS - 1) * itl_ms) / 1e3)
    said = large.said
    return Row(
        client=peer.name,
        itl_ms=itl_ms,
        concurrency=concurrency,
        requests=large.served,
        rate_share=large.rate / ideal,
        in_flight_share=large.in_flight_share,
        ttft_p50_ms=said.p50_ms,
        ttft_p99_ms=said.p99_ms,
        cpu_s_per_1000=cpu,
        failed=said.failed,
        limited=said.limited,
        server_late_p99_ms=large.late_p99_ms,
    )


def show(rows: list[Row]) -> None:
    heads = ("ITL", "conc.", "rate", "flight", "P50", "P99", "CPU/1000", "late")
    print(f"\n{'client':18}" + "".join(f"{head:>9}" for head in heads) + "  limited")
    for row in rows:
        cells = [f"{row.itl_ms:.0f}", f"{row.concurrency}", f"{row.rate_share:.3f}", f"{row.in_flight_share:.3f}"]
        cells += [f"{row.ttft_p50_ms:.1f}", f"{row.ttft_p99_ms:.1f}", f"{row.cpu_s_per_1000:.3f}"]
        cells.append(f"{row.server_late_p99_ms:.1f}")
        limited = "" if row.limited is None else ("yes" if row.limited else "no")
        failed = f"  {row.failed} failed" if row.failed else ""
        print(f"{row.client:18}" + "".join(f"{cell:>9}" for cell in cells) + f"  {limited}{failed}")


def honesty(url: str, itl_ms: float, repeats: int) -> list[dict[str, Any]]:
    """Rounds with a client made slow by degrees; the server's count in flight is the judge."""
    found: list[dict[str, Any]] = []
    for concurrency in (8, 64):
        for share in (0.0, 0.2, 0.5, 0.8):
            slow = Peer(
                "chunktune",
                lambda u, c, n, _, share=share: [
                    sys.executable, str(HERE / "ruler" / "ours.py"), u, str(c), str(n), str(share)
                ],
                peers._from_list,
            )  # fmt: skip
            for _ in range(repeats):
                done = run_once(slow, url, concurrency, concurrency * 15)
                found.append(
                    {
                        "concurrency": concurrency,
                        "held": share,
                        "in_flight_share": done.in_flight_share,
                        "starved": done.in_flight_share < STARVED,
                        "said_limited": bool(done.said.limited),
                        "itl_ms": itl_ms,
                    }
                )
    return found


def show_honesty(found: list[dict[str, Any]]) -> None:
    print(f"\nA client made slow on purpose\n{'conc.':>5} {'held':>5} {'in flight':>9}  by the server  said so")
    for row in found:
        print(
            f"{row['concurrency']:5d} {row['held']:5.0%} {row['in_flight_share']:9.3f}  "
            f"{'limited' if row['starved'] else 'kept up':13}  {'yes' if row['said_limited'] else 'no'}"
        )
    starved = [row for row in found if row["starved"]]
    silent = [row for row in starved if not row["said_limited"]]
    print(f"{len(starved)} rounds limited by the client, {len(starved) - len(silent)} of them said so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--itl", type=float, nargs="+", default=[5.0, 20.0], help="ms between tokens")
    parser.add_argument("--only", nargs="+", help="clients whose name contains one of these")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing")
    parser.add_argument("--quick", action="store_true", help="a third of the requests, no slowed client")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.install:
        for package in ("guidellm", "aiperf", "servebench"):
            peers.install(package)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        known_server, floor_client = build(Path(name))
        clients = [
            peers.floor(floor_client), peers.ours(), peers.lean_loop(), peers.vllm_bench(),
            peers.servebench(), peers.aiperf(), peers.guidellm(),
        ]  # fmt: skip
        if options.only:
            clients = [p for p in clients if any(word.lower() in p.name.lower() for word in options.only)]
        for itl_ms in options.itl:
            turns = 9 if options.quick else 25
            for concurrency in options.concurrency:
                for peer in clients:
                    if peer.missing:
                        skipped[peer.name] = peer.missing
                        continue
                    with server(known_server, itl_ms) as url:
                        try:
                            rows.append(measure(peer, url, itl_ms, concurrency, turns))
                        except (RuntimeError, KeyError, ValueError, OSError) as error:
                            skipped[f"{peer.name} at {concurrency}"] = f"failed: {error}"
                    print(".", end="", file=sys.stderr, flush=True)
        if not options.quick:
            with server(known_server, options.itl[0]) as url:
                found = honesty(url, options.itl[0], 2)
    print(file=sys.stderr)
    if options.json:
        document = {"rows": [asdict(r) for r in rows], "skipped": skipped, "slowed": found}
        print(json.dumps({**document, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}, indent=2))
        return
    show(rows)
    if found:
        show_honesty(found)
    for name, reason in skipped.items():
        print(f"{name}: {reason}")


if __name__ == "__main__":
    main()
