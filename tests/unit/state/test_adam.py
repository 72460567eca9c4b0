"""Host Adam: exact halves, torch's own results bit for bit, and no dependence on how it runs."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.cache_dir import cache_folder
from megacompile.state import adam
from megacompile.state.adam import AdamHyper, adamw_rows, adamw_step, join, split, torch_fused
from tests.support.scripts import Script

BACKENDS = ("c", "torch")
# Where torch has no vector instructions, and on the ends that it cuts off whole vectors, its kernel
# uses no fused multiply-add and some double precision. There the moments may differ by this many
# ulp of the largest quantity that enters an element, and the weight by as many from what the
# moments make of it. (Not from torch's weight: m / sqrt(v) turns rounding noise into full steps.)
ULP = 4
BITWISE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
HYPER = AdamHyper(lr=1e-3, weight_decay=0.1)


@pytest.fixture(params=BACKENDS)
def any_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on both backends; skip C only where there is no compiler."""
    try:
        adam.set_backend(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield request.param
    adam.set_backend("auto")


@pytest.fixture
def restored() -> Iterator[None]:
    """Look for a compiler again when the test has put the environment back."""
    yield
    adam._library.cache_clear()


@pytest.fixture
def compiles_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that build a library and compute nothing with it."""
    monkeypatch.setattr(adam, "FLAGS", adam.FLAGS.replace("-O3", "-O0"))


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


def random_state(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, moments, gradient; the gradient spans many magnitudes and has zeros."""
    generator = torch.Generator().manual_seed(seed)
    w, m, g, e = (torch.randn(n, generator=generator) for _ in range(4))
    g = torch.where(torch.rand(n, generator=generator) < 0.1, 0.0, g * 10 ** (3 * e))
    return w, m * 0.1, torch.rand(n, generator=generator) * 0.01, g


def halves(n: int) -> tuple[Tensor, Tensor]:
    return torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)


def take(
    state: tuple[Tensor, ...], hyper: AdamHyper, *, layout: str = "whole", threads: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """One step on copies; the weight comes back joined."""
    w, m, v = (x.clone() for x in state[:3])
    if layout == "whole":
        adamw_step(w, m, v, state[3], hyper, threads)
        return w, m, v
    pair = halves(w.numel())
    split(w, *pair)
    adamw_step(pair, m, v, state[3], hyper, threads)
    return join(*pair, w), m, v


def reference(state: tuple[Tensor, ...], hyper: AdamHyper) -> tuple[Tensor, Tensor, Tensor]:
    """torch's fused kernel on one thread, after the scaling that clipping does."""
    w, m, v = (x.clone() for x in state[:3])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch_fused(w, m, v, state[3].float().mul(hyper.grad_scale), hyper)
    torch.set_num_threads(before)
    return w, m, v


def assert_as_torch(
    got: tuple[Tensor, ...], state: tuple[Tensor, ...], hyper: AdamHyper, *, bitwise: bool = BITWISE
) -> None:
    expected = reference(state, hyper)
    if bitwise:
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
        return
    w, m, v, g = (x.double() for x in state)
    g = g.abs() * hyper.grad_scale + hyper.weight_decay * w.abs()
    close(got[1], expected[1], torch.maximum(m.abs(), g))
    close(got[2], expected[2], torch.maximum(v, g * g))
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    denominator = (got[2].double() / correction2).sqrt() + hyper.eps
    update = hyper.lr / correction1 * got[1].double() / denominator
    decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
    close(got[0], w * decay - update, w.abs() + update.abs())


def close(got: Tensor, expected: Tensor, scale: Tensor) -> None:
    assert ((got.double() - expected.double()).abs() <= ULP * 2.0**-23 * scale).all()


def structured_bits() -> Iterator[Tensor]:
    """Every high half with telling low halves, every low half with telling high ones, a sweep."""
    every = np.arange(1 << 16, dtype=np.uint32)
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x5A5A], np.uint32)
    highs = np.array(
        [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0x8000, 0xFF7F, 0xFF80, 0xFFFF],
        np.uint32,
    )
    yield from (
        torch.from_numpy(x.reshape(-1).view(np.int32))
        for x in (
            (every[:, None] << 16) | lows[None],
            (highs[:, None] << 16) | every[None],
            np.arange(0, 1 << 32, 1021, dtype=np.uint64).astype(np.uint32),
        )
    )


def test_halves_by_their_definition_and_join_gives_every_pattern_back(any_backend: str) -> None:
    for bits in structured_bits():
        x = bits.view(torch.float32)
        hi, lo = halves(bits.numel())
        split(x, hi, lo)
        wide = bits.numpy().view(np.uint32).astype(np.int64)
        high = ((wide + 0x8000) % (1 << 32)) >> 16
        assert np.array_equal(hi.view(torch.int16).numpy().view(np.uint16), high)
        rest = (wide - (high << 16) + (1 << 31)) % (1 << 32) - (1 << 31)
        assert np.array_equal(lo.numpy(), rest)
        assert same(join(hi, lo, torch.empty_like(x)), x)


def test_high_half_is_bf16_to_nearest(any_backend: str) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    hi, lo = halves(x.numel())
    split(x, hi.view(torch.int16), lo)  # the int16 view is taken too
    assert ((hi.double() - x).abs() <= (x.bfloat16().double() - x).abs()).all()


hypers = st.builds(
    AdamHyper,
    lr=st.floats(1e-6, 1e-1),
    beta1=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.5, 0.95, 0.999, 0.99999]),
    eps=st.sampled_from([1e-15, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    step=st.integers(1, 100_000),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    grad_scale=st.sampled_from([1.0, 0.3712, 1e-4]),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it holds for all examples
)
@given(hyper=hypers, seed=st.integers(0, 1000))
def test_equals_torch_fused(any_backend: str, hyper: AdamHyper, seed: int) -> None:
    state = random_state(1 << 10, seed)
    for grad in (state[3], state[3].bfloat16()):
        inputs = (*state[:3], grad)
        before = grad.clone()
        whole = take(inputs, hyper)
        assert torch.equal(grad, before)
        assert_as_torch(whole, inputs, hyper)
        parts = take(inputs, hyper, layout="halves")
        assert all(same(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("decoupled", [True, False])
def test_follows_torch_optimizer_for_many_steps(any_backend: str, decoupled: bool) -> None:
    w, *_ = random_state(1 << 10)
    parameter = torch.nn.Parameter(w.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.05, fused=True)
    pair = halves(w.numel())
    split(w, *pair)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(1, 21):
        parameter.grad = random_state(w.numel(), step)[3]
        optimizer.step()
        hyper = AdamHyper(lr=1e-2, weight_decay=0.05, step=step, decoupled=decoupled)
        adamw_step(pair, m, v, parameter.grad, hyper)
    torch.set_num_threads(threads)
    got = join(*pair, torch.empty_like(w))
    if BITWISE:
        assert same(got, parameter.detach())
    else:
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_ends_are_within_the_stated_ulp_of_torch(any_backend: str) -> None:
    for n in (1, 7, 63, 1003):
        for decoupled in (True, False):
            hyper = replace(HYPER, step=9, decoupled=decoupled)
            state = random_state(n)
            assert_as_torch(take(state, hyper), state, hyper, bitwise=False)


@pytest.mark.parametrize("layout", ["whole", "halves"])
def test_threads_and_cuts_change_nothing(any_backend: str, layout: str) -> None:
    hyper = replace(HYPER, step=4, grad_scale=0.77)
    n = 300_007
    state = random_state(n)
    state = (*state[:3], state[3].bfloat16())
    expected = take(state, hyper, layout=layout)
    for threads in (2, 3, 5):
        got = take(state, hyper, layout=layout, threads=threads)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    for cuts in ([1], [63, 64, 65, 200_001], [100_000, 299_999]):
        edges = [0, *cuts, n]
        pieces = [
            take(tuple(x[a:b] for x in state), hyper, layout=layout, threads=2) for a, b in pairwise(edges)
        ]
        joined = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
        assert all(same(a, b) for a, b in zip(joined, expected, strict=True))


def test_backends_agree_bit_for_bit() -> None:
    if not BITWISE:
        pytest.skip("torch runs without vector instructions here")
    results = []
    for name in ("auto", "torch"):
        adam.set_backend("torch" if name == "torch" else "auto")
        results.append(take(random_state(70_001), HYPER, layout="halves", threads=2))
    adam.set_backend("auto")
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_worker_threads_may_step_at_the_same_time(any_backend: str) -> None:
    states = [random_state(50_001, seed) for seed in range(6)]
    expected = [take(state, HYPER) for state in states]
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda state: take(state, HYPER), states))
    for a, b in zip(got, expected, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_denormals_survive_whatever_mode_the_caller_set() -> None:
    if adam.backend() != "c" or not torch.set_flush_denormal(True):
        pytest.skip("needs the C kernel and a CPU that can flush denormals")
    torch.set_flush_denormal(False)
    w, m, v, g = random_state(4096)
    state = (w, m * 1e-39, v * 1e-36, g * 1e-20)
    expected = take(state, HYPER)
    torch.set_flush_denormal(True)
    got = take(state, HYPER)
    torch.set_flush_denormal(False)
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert (expected[1] != 0).any()


def test_nonfinite_gradients_come_out_as_torch_has_them(any_backend: str) -> None:
    w, m, v, g = random_state(64)
    g[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    got, expected = take((w, m, v, g), HYPER), reference((w, m, v, g), HYPER)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isposinf(), b.isposinf())
        assert torch.equal(a.isneginf(), b.isneginf())


def test_empty_and_parameter_inputs(any_backend: str) -> None:
    empty = torch.empty(0)
    adamw_step(empty, empty.clone(), empty.clone(), empty.clone(), HYPER)
    w, m, v, g = random_state(100)
    parameter = torch.nn.Parameter(w.clone())
    adamw_step(parameter, m.clone(), v.clone(), g, HYPER)
    assert same(parameter.detach(), take((w, m, v, g), HYPER)[0])


def test_private_torch_api_is_there() -> None:
    for function in ("_fused_adamw_", "_fused_adam_"):
        schema = str(getattr(torch.ops.aten, function).default._schema)
        assert hasattr(torch, function)
        for name in ("exp_avg_sqs", "state_steps", "lr", "beta2", "amsgrad", "maximize"):
            assert name in schema


@pytest.mark.parametrize(
    ("position", "bad", "says"),
    [
        (0, torch.zeros(8, dtype=torch.float64), "master must be torch.float32"),
        (0, (torch.zeros(8), torch.zeros(8, dtype=torch.int16)), "hi must be"),
        (0, (torch.zeros(8).bfloat16(), torch.zeros(8)), "lo must be torch.int16"),
        (1, torch.zeros(8).bfloat16(), "exp_avg must be torch.float32"),
        (2, torch.zeros(9), "exp_avg_sq has 9 elements, but master has 8"),
        (3, torch.zeros(8).half(), "grad must be torch.float32 or torch.bfloat16"),
        (3, torch.zeros(16)[::2], "grad must be a contiguous"),
        (3, torch.zeros(2, 4), "grad must be a contiguous 1-D"),
        (1, torch.zeros(8, device="meta"), "exp_avg must be a contiguous 1-D CPU"),
        (5, 0, "At least one thread"),
    ],
)
def test_bad_inputs_are_named(position: int, bad: object, says: str) -> None:
    arguments: list[object] = [*(torch.zeros(8) for _ in range(4)), HYPER, None]
    arguments[position] = bad
    with pytest.raises(ValueError, match=says):
        adamw_step(*arguments)  # type: ignore[arg-type]


def test_bad_halves_and_hyper_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="lo has 4 elements"):
        split(torch.zeros(5), torch.zeros(5).bfloat16(), torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"Betas must be in \[0, 1\)"):
        AdamHyper(lr=1e-3, beta2=1.0)
    with pytest.raises(ValueError, match="counts from 1"):
        AdamHyper(lr=1e-3, step=0)


def needs_compiler() -> None:
    if adam._library()[0] is None:
        pytest.skip(adam._library()[1])


def test_no_compiler_means_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    adam.set_backend("auto")
    assert adam.backend() == "torch"
    assert "no C compiler" in adam.describe_backend()
    with pytest.raises(RuntimeError, match="no C compiler"):
        adam.set_backend("c")


def test_failing_compiler_means_torch_and_its_message_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adam.set_backend("auto")
    assert adam.backend() == "torch"
    assert "no such thing" in adam.describe_backend()


def test_cache_that_cannot_be_written_or_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None, compiles_fast: None
) -> None:
    needs_compiler()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    adam.set_backend("c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    adam.set_backend("c")
    (built,) = (tmp_path / "megacompile").iterdir()
    assert built.name.startswith(
        "adam-fp32-"
    )  # the kernels of other formats are built for those who use them
    damaged = tmp_path / "damaged" / "megacompile"
    damaged.mkdir(parents=True)
    (damaged / built.name).write_text("not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(damaged.parent))
    adam.set_backend("c")
    assert (damaged / built.name).stat().st_size > 1000
    assert "C kernel" in adam.describe_backend()


def compiler() -> str:
    return shutil.which("cc") or shutil.which("gcc") or "clang"


def built_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a cache folder, as it was built."""
    adam.set_backend("c")
    kept = next(cache_folder().glob("adam-fp32-*.so"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return Path(shutil.copy(kept, cache_folder()))


def test_a_changed_byte_or_a_cut_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    needs_compiler()
    path, draw = built_in(tmp_path, monkeypatch), random.Random(0)
    whole = path.read_bytes()
    for _ in range(60):
        place = draw.randrange(len(whole))
        changed = whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :]
        for content in (changed, whole[:place]):
            path.write_bytes(content)
            with pytest.raises(OSError, match="is damaged"):
                adam._read_library(path)


def test_a_library_that_is_loaded_does_not_change_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    needs_compiler()
    path = built_in(tmp_path, monkeypatch)
    adam.set_backend("c")
    with path.open("r+b") as file:
        file.truncate(0)
    assert adam.join(*halves_of_one(), torch.empty(1)).item() == 1  # a mapped file would end the process
    adam.set_backend("c")
    assert path.stat().st_size > 1000


def halves_of_one() -> tuple[Tensor, Tensor]:
    hi, lo = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
    adam.split(torch.ones(1), hi, lo)
    return hi, lo


@pytest.mark.parametrize("open_to", ["others", "another owner", "nobody else"])
def test_a_library_that_others_may_have_put_there_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None, open_to: str
) -> None:
    """It has the name and, but for the last case, the SHA-256 of one that was built."""
    needs_compiler()
    source, ran = tmp_path / "theirs.c", tmp_path / "ran"
    code = f'__attribute__((constructor)) void run(void) {{ fclose(fopen("{ran}", "w")); }}'
    source.write_text(f"#include <stdio.h>\n{code}\n")
    path = built_in(tmp_path, monkeypatch)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", path, source], check=True)
    if open_to != "nobody else":
        path.write_bytes(adam._with_digest(path.read_bytes()))
    theirs = path.read_bytes()
    if open_to == "others":
        path.parent.chmod(0o777)
    elif open_to == "another owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with (
        nullcontext()
        if open_to == "nobody else"
        else pytest.warns(UserWarning, match="nothing is kept in it")
    ):
        adam.set_backend("c")
    assert adam.join(*halves_of_one(), torch.empty(1)).item() == 1
    assert not ran.exists()
    assert (path.read_bytes() == theirs) == (open_to != "nobody else")


def test_the_cache_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    (tmp_path / "megacompile").chmod(0o755)  # as it was made before
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_without_a_home_there_is_a_folder_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    folder = cache_folder()
    assert folder == cache_folder() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == Path(tempfile.gettempdir())


@pytest.mark.slow
def test_processes_race_to_build(tmp_path: Path) -> None:
    needs_compiler()
    program = (
        "from megacompile.state import adam as h; h.set_backend('c'); print(h.backend())"  # loads it anew
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    running = [Script(program, environment=environment) for _ in range(2)]
    assert [script.finish().stdout.strip() for script in running] == ["c", "c"]
    assert [x.suffix for x in (tmp_path / "megacompile").iterdir()] == [".so"]


def test_threads_race_to_build(tmp_path: Path, compiles_fast: None) -> None:
    needs_compiler()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: adam._load("fp32", compiler(), tmp_path), range(2)))
    assert [x.suffix for x in tmp_path.iterdir()] == [".so"]


ROWS = 40
ODD = replace(HYPER, decoupled=False, maximize=True, grad_scale=0.3, step=3)


@pytest.mark.parametrize("width", [1, 7, 255, 300, 1031])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hyper", [HYPER, ODD])
def test_rows_alone_get_the_bits_of_the_whole_table(
    width: int, halves: bool, dtype: torch.dtype, hyper: AdamHyper, any_backend: str
) -> None:
    """Some rows by their gradients and the others by none, wherever vectors end, are one step of all."""
    weight, *moments, grad = random_state(ROWS * width, seed=width)
    grad = grad.view(ROWS, width).to(dtype)
    named = torch.tensor([0, 3, 4, 17, ROWS - 1])
    others = torch.tensor([row for row in range(ROWS) if row not in named])
    grad[others] = 0
    whole, apart = ([x.clone() for x in (weight, *moments)] for _ in range(2))
    for state in (whole, apart):
        if halves:
            high, low = (
                torch.empty_like(weight, dtype=torch.bfloat16),
                torch.empty_like(weight, dtype=torch.int16),
            )
            split(weight, high, low)
            state[:1] = [high, low]

    def master(state: list[Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        return (state[0], state[1]) if halves else state[0]

    adamw_step(master(whole), *whole[-2:], grad.flatten(), hyper, 2)
    adamw_rows(master(apart), *apart[-2:], others.flip(0), width, None, hyper, 2)
    assert not torch.equal(whole[-1], apart[-1])
    adamw_rows(master(apart), *apart[-2:], named, width, grad[named], hyper, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))
