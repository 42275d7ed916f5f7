"""The table: which jobs, by whom. A job is timed as one group, its runners in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch

from partita import models
from partita.bench import diagnostics, peers
from partita.bench.ours import EPS, Setting, engine, whole
from partita.bench.scan import jax_scan
from partita.bench.timing import Runner
from partita.samplers import PSGLD, SGLD, Sampler
from partita.structure import Joint, Reservoir, Structure, Structured, Window, masks, partitions

ROWS = 10_000  # of data
SCAN = 100


@cache
def mlp(device: str) -> Setting:
    return _setting(partial(models.mlp, 784, (50, 50), 10), (784,), 500, device)


@cache
def resnet(channels: int, size: int, B: int, device: str, norm: str = "frn") -> Setting:
    return _setting(partial(models.resnet, channels, norm=norm), (channels, size, size), B, device)  # type: ignore[arg-type]


def _setting(network: Callable[[], torch.nn.Module], shape: tuple[int, ...], B: int, device: str) -> Setting:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        data = torch.randn(ROWS, *shape), torch.randint(10, (ROWS,))
        return Setting(network(), data, B, torch.device(device))


def s_d(K: int = 1, share: str = "batch", dtype: str = "float32", R: int = 64, every: int = 10) -> Structured:
    mask = masks.Bernoulli(0.5, count=K)
    return Structured(partitions.each(), mask, Window(R, every=every, dtype=dtype), share=share)


def s(M: int, count: int | None = None) -> Structured:
    return Structured(partitions.random(M, seed=0), masks.OneGroup(count), Reservoir(64, every=10))


def groups(device: str, long: bool = False) -> Iterator[list[Runner]]:
    """The jobs for this kind of device, in the order of the table; on a CPU those that take minutes only if `long`."""
    yield from _mlp(device)
    yield [
        Runner("Diagnostics, 4 x 25,000 draws", "R-hat, bulk and tail ESS of 40 variables", 4, who, partial(make, 40))
        for who, make in (("partita", diagnostics.ours), ("ArviZ", diagnostics.arviz))
    ]
    for norm in ("frn", "batch") if device == "cuda" else ("frn",):
        yield from _resnet(device, "ResNet-20 B=128", norm, resnet(3, 32, 128, device, norm), long)
        yield from _resnet(device, "ResNet-20 B=500", norm, resnet(1, 28, 500, device, norm), long)


def _mlp(device: str) -> Iterator[list[Runner]]:
    at, gpu = mlp(device), device == "cuda"
    fast = "graph" if gpu else "compile"
    job = "MLP B=500"

    def ours(
        method: str, sampler: Sampler, structure: Structure, chains: int, mode: str = fast, precision: str = "float32"
    ) -> Runner:
        who = f"partita {mode}" + ("" if precision == "float32" else f" {precision}")
        return Runner(job, method, chains, who, partial(engine, at, sampler, structure, chains, mode, precision))

    sgld, psgld = SGLD(EPS), PSGLD(EPS)
    for chains in (1, 8, 128):
        group = [ours("SGLD", sgld, Joint(), chains)]
        if chains == 1:
            group += [ours("SGLD", sgld, Joint(), 1, "eager")]
            group += [Runner(job, "SGLD", 1, "posteriors", partial(peers.posteriors, at))]
            group += [Runner(job, "SGLD", 1, "PyTorch loop", partial(peers.pytorch, at, "SGLD"))]
            group += [Runner(job, "SGLD", 1, "BlackJAX loop", partial(peers.blackjax, at, 1, "loop"))]
        short = 10 if chains == 128 and not gpu else SCAN
        group += [
            Runner(job, "SGLD", chains, "BlackJAX scan", partial(peers.blackjax, at, chains, "scan", short), short)
        ]
        yield group
    for chains in (1, 8, 128):
        group = [ours("S_d-pSGLD K=1", psgld, s_d(), chains)]
        if gpu:
            group += [ours("S_d-pSGLD K=1", psgld, s_d(), chains, precision=p) for p in ("tf32", "bf16")]
            group += [
                Runner(job, "S_d-pSGLD K=1", chains, f"JAX scan {p}", partial(jax_scan, at, chains, p), SCAN, True)
                for p in ("float32", "bf16")
            ]
        if chains == 1:
            group += [ours("pSGLD", psgld, Joint(), 1), ours("S_d-pSGLD K=1", psgld, s_d(), 1, "eager")]
            group += [Runner(job, "S_d-pSGLD K=1", 1, "PyTorch loop", partial(peers.pytorch, at, "S_d-pSGLD"))]
        yield group
    many = (1, 128) if gpu else (1,)
    for chains in many:
        yield [ours("S_d-pSGLD K=1", psgld, s_d(), chains, precision="tf32" if gpu else "float32")] + [
            ours(
                f"S_d-pSGLD K={K}{' split' if share == 'split' else ''}",
                psgld,
                s_d(K, share),
                chains,
                precision="tf32" if gpu else "float32",
            )
            for K, share in ((4, "batch"), (4, "split"), (16, "batch"))
        ]
    yield [ours(f"S-pSGLD M={M}", psgld, s(M), 1) for M in (2, 8, 32)] + [
        ours("S-pSGLD M=32, 4 of M", psgld, s(32, 4), 1)
    ]
    yield [
        ours(f"S_d-pSGLD, window {R:,} {dtype}, every step", psgld, s_d(R=R, dtype=dtype, every=1), 8)
        for R, dtype in ((64, "float32"), (1024, "float32"), (1024, "bfloat16"))
    ]
    steps = 20_000 if gpu else 1_000
    yield [
        Runner(
            job,
            "S_d-pSGLD K=1",
            1,
            f"pt.sample, {steps:,} steps",
            partial(whole, at, steps, sampler=psgld, structure=s_d(), chains=1, engine=fast, thin=10),
            steps,
        )
    ]


def _resnet(device: str, job: str, norm: str, at: Setting, long: bool) -> Iterator[list[Runner]]:
    gpu = device == "cuda"
    job, psgld = f"{job} {'FRN' if norm == 'frn' else 'BatchNorm'}", PSGLD(EPS)
    fast, quick = ("graph", "bf16") if gpu else ("compile", "float32")

    def ours(method: str, structure: Structure, chains: int, mode: str = fast, precision: str = quick) -> Runner:
        who = f"partita {mode}" + ("" if precision == "float32" else f" {precision}")
        how = "streams" if gpu and chains > 1 else "auto"
        return Runner(job, method, chains, who, partial(engine, at, psgld, structure, chains, mode, precision, how))

    one = "S_d-pSGLD K=1"
    loops = [("float32", "plain")] + ([("bf16", "channels_last")] if gpu else [])
    group = [ours(one, s_d(), 1)]
    group += [
        Runner(
            job,
            one,
            1,
            "PyTorch loop" + (f" {p} {layout}" if gpu else ""),
            partial(peers.pytorch, at, "S_d-pSGLD", p, layout),
        )
        for p, layout in loops
    ]
    group += [ours("pSGLD", Joint(), 1)] if gpu else []
    for p in ("float32", "bf16") if gpu else ():
        group += [Runner(job, one, 1, f"JAX scan {p}", partial(jax_scan, at, 1, p), SCAN, True)]
    if not gpu and norm == "frn":
        group += [Runner(job, "SGLD", 1, "posteriors", partial(peers.posteriors, at))]
    if gpu or long:
        group += [ours(one, s_d(), 8), ours("S_d-pSGLD K=2", s_d(2), 1), ours("S_d-pSGLD K=4", s_d(4), 1)]
        group += [ours("S_d-pSGLD K=4 split", s_d(4, "split"), 1)]
    yield group
