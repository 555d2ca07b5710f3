"""The scans against loops over time: values, final state and all gradients, that of the initial state included."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_memory.lit.callbacks.progress import Progress
from lit_memory.memory import compiled, scan
from lit_memory.memory.scan import CHUNK, decayed_attention, linear_scan, selective_scan, with_kernel
from lit_memory.registry import MODELS

LENGTHS = [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 5]
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)


@pytest.fixture(params=["compiled", "plain", "wide"])
def way(request, monkeypatch):
    """The scans run through numba's loops, or through tensor operations as where numba is not installed: token by
    token, or as on CUDA by blocks side by side."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setattr(compiled, "installed", lambda: request.param == "compiled")
    monkeypatch.setattr(scan, "_is_wide", lambda t: request.param == "wide")
    return request.param


@pytest.fixture
def _plain(monkeypatch):
    monkeypatch.setattr(compiled, "installed", lambda: False)


def selective_inputs(T, dtype=torch.float64, B=2, E=5, N=3):
    """x, Delta, A, B, C and a state that is not zero."""
    draw = torch.Generator().manual_seed(T)
    shapes = [(B, T, E), (B, T, E), (E, N), (B, T, N), (B, T, N), (B, E, N)]
    x, delta, A, b, c, state = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return [t.to(dtype).requires_grad_() for t in (x, delta.abs(), -A.exp(), b, c, state)]


def attention_inputs(T, dtype=torch.float64, B=2, H=2, K=3, V=4):
    """r, k, v, decay, bonus and a state that is not zero."""
    draw = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (H, K), (B, H, K, V)]
    r, k, v, decay, bonus, state = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return [t.to(dtype).requires_grad_() for t in (r, k, v, decay.sigmoid(), bonus, state)]


def naive_selective(x, delta, A, B, C, h):
    """Eq. 2a with eq. 4, one token after another."""
    ys = []
    for t in range(x.shape[1]):
        h = torch.exp(torch.einsum("be,en->ben", delta[:, t], A)) * h + torch.einsum(
            "be,bn,be->ben", delta[:, t], B[:, t], x[:, t]
        )
        ys.append(torch.einsum("ben,bn->be", h, C[:, t]))
    return torch.stack(ys, 1), h


def naive_attention(r, k, v, w, u, S):
    """Spec 9, one token after another."""
    outs = []
    for t in range(r.shape[1]):
        outer = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], S + u[None, :, :, None] * outer))
        S = w[:, t, :, :, None] * S + outer
    return torch.stack(outs, 1), S


def values_and_gradients(fn, inputs):
    """Output, final state, and the gradients of a random functional of both."""
    out = fn(*inputs)
    draw = torch.Generator().manual_seed(0)
    loss = sum((t * torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype)).sum() for t in out)
    return [*out, *torch.autograd.grad(loss, inputs)]


def agree(a, b, tol):
    """Relative to the largest entry of each tensor: gradients add up over time."""
    return all((x - y).abs().max() <= tol * max(1.0, y.abs().max().item()) for x, y in zip(a, b, strict=True))


@PRECISIONS
@pytest.mark.parametrize("T", LENGTHS)
def test_selective_scan_slow_twin(T, dtype, tol, way):
    inputs = selective_inputs(T, dtype)
    assert agree(values_and_gradients(selective_scan, inputs), values_and_gradients(naive_selective, inputs), tol)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_samples_that_the_cache_does_not_hold(rows, monkeypatch, _plain):
    """A batch that is scanned a few samples at a time gives what it gives at once."""
    inputs, seen = selective_inputs(CHUNK + 3, B=5), []
    whole = values_and_gradients(selective_scan, inputs)
    monkeypatch.setattr(scan, "CACHE", rows * CHUNK * inputs[2].numel())
    apply = scan._SelectiveScan.apply
    monkeypatch.setattr(scan._SelectiveScan, "apply", lambda x, *rest: seen.append(len(x)) or apply(x, *rest))
    assert agree(values_and_gradients(selective_scan, inputs), whole, 1e-12) and seen == [rows] * (5 // rows) + [
        5 % rows
    ] * (5 % rows > 0)


@PRECISIONS
@pytest.mark.parametrize("T", LENGTHS)
def test_decayed_attention_slow_twin(T, dtype, tol, way):
    inputs = attention_inputs(T, dtype)
    assert agree(values_and_gradients(decayed_attention, inputs), values_and_gradients(naive_attention, inputs), tol)


@pytest.mark.parametrize("span", [CHUNK, 3 * CHUNK + 1, 1000])
def test_blocks_of_blocks(span, monkeypatch, _plain):
    """As on CUDA, where a text has more blocks than a block has tokens, in chunks of any number of tokens: far fewer
    calls than tokens, where a chunk is long."""
    T, calls, addcmul = 2 * CHUNK * CHUNK + CHUNK + 3, [], torch.addcmul
    monkeypatch.setattr(scan, "_is_wide", lambda t: True)
    for fast, slow, inputs in (
        (selective_scan, naive_selective, selective_inputs(T)),
        (decayed_attention, naive_attention, attention_inputs(T)),
    ):
        monkeypatch.setattr(scan, "WIDE", span * inputs[-1].numel())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "addcmul", lambda *args: calls.append(1) or addcmul(*args))
            found = values_and_gradients(fast, inputs)
        assert agree(found, values_and_gradients(slow, inputs), 1e-10)
    assert span < 1000 or len(calls) < T / 2


SIZES = [{"B": 1, "E": 1, "N": 1}, {"B": 3, "E": 40, "N": 16}, {"B": 2, "E": 7, "N": 33}]


@PRECISIONS
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiled_sizes(sizes, dtype, tol):
    """Channels and states that fill no vector of the processor, and fill several: the twin is the plain scan."""
    pytest.importorskip("numba")
    inputs = selective_inputs(2 * CHUNK + 3, dtype, **sizes)
    found = values_and_gradients(compiled.selective_scan, inputs)
    assert agree(found, values_and_gradients(scan.plain_selective_scan, inputs), tol)
    r, k, v, decay, _, state = attention_inputs(2 * CHUNK + 3, dtype, B=2, H=3, K=sizes["E"], V=sizes["N"])
    inputs = [r, k, v, decay, state]
    found = values_and_gradients(compiled.decayed_attention, inputs)
    assert agree(found, values_and_gradients(scan.plain_decayed_attention, inputs), tol)


def test_tensors_of_any_layout(way):
    """Transposed, expanded and sliced inputs give what contiguous ones give, and nothing is written to them."""
    whole = [t.detach() for t in selective_inputs(CHUNK + 2)]
    odd = [t.mT.contiguous().mT for t in whole]
    odd[3] = torch.cat([whole[3], whole[3]], dim=-1)[..., : whole[3].shape[-1]]
    kept = [t.clone() for t in odd]
    found, expected = (selective_scan(*inputs) for inputs in (odd, whole))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(odd, kept, strict=True)) and found[1] is not odd[5]


@pytest.mark.parametrize("where", range(6))
def test_a_nan_is_seen(where, way):
    """What guards a run finds it in the outputs: the compiled exponential clamps no NaN away."""
    inputs = [t.detach().clone() for t in selective_inputs(3, torch.float32)]
    inputs[where].view(-1)[0] = float("nan")
    assert selective_scan(*inputs)[0].isnan().any()


def test_exponential():
    """To 1e-7 from the smallest normal number to the largest, 0 and infinity beyond, and what is no number stays so."""
    kernels, numba = pytest.importorskip("lit_memory.memory.kernels"), pytest.importorskip("numba")

    @numba.njit
    def fill(x, y):
        for i in range(len(x)):
            y[i] = kernels.exponential(x[i])

    x = torch.linspace(-87, 88, 100_001)
    y = torch.empty_like(x)
    fill(x.numpy(), y.numpy())
    assert ((y - x.double().exp()) / x.double().exp()).abs().max() < 1.2e-7
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, -inf, 0.0, -0.0, -200.0, 200.0])
    y = torch.empty_like(x)
    fill(x.numpy(), y.numpy())
    assert y.isnan().tolist() == [True] + [False] * 6 and y[1:].tolist() == [inf, 0.0, 1.0, 1.0, 0.0, inf]


def test_what_runs_plain():
    """A half precision, vmap and torch.compile have no compiled scan; nor has a machine without numba."""
    state = torch.zeros(2, 3, 4)
    assert compiled.applies(state) == compiled.applies(state.double()) == compiled.installed()
    assert not compiled.applies(state.bfloat16()) and not compiled.applies(state.to("meta"))
    seen = []
    torch.func.vmap(lambda t: seen.append(compiled.applies(t)) or t)(state)
    assert seen == [False]


def test_kernels_compile_in_a_fork():
    """A run is a fork of a process that has used torch."""
    pytest.importorskip("numba")
    inputs = [t.detach() for t in selective_inputs(CHUNK)]
    expected = scan.plain_selective_scan(*inputs)[0]

    def child(found):
        found.send((compiled.selective_scan(*inputs)[0] - expected).abs().max().item())

    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    process.join()
    assert process.exitcode == 0 and here.recv() < 1e-12


CALLER = """from loops.kernels import compiled
from loops.callee import inner

@compiled
def outer(x):
    return inner(x)
"""
CALLEE = "from loops.kernels import compiled\n\n@compiled\ndef inner(x):\n    return x + {}\n"


def test_a_kept_loop_is_that_of_todays_files(tmp_path):
    """A loop whose callee has changed in another file is compiled anew; before that, it is taken as it was kept."""
    pytest.importorskip("numba")
    folder, kept = tmp_path / "loops", tmp_path / "kept"
    folder.mkdir()
    text = Path(compiled.__file__).with_name("kernels.py").read_text()
    named = re.sub(r"^FILES = .*", 'FILES = ("callee.py", "caller.py", "kernels.py")', text, flags=re.MULTILINE)
    (folder / "kernels.py").write_text(named)
    (folder / "caller.py").write_text(CALLER)

    def called(added):
        (folder / "callee.py").write_text(CALLEE.format(added))
        code = "from loops.caller import outer; print(outer(1), *outer.stats.cache_hits.values())"
        # Python takes bytecode for that of a file with as many letters that was written in the same second.
        environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        environ |= {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(kept)}
        out = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        return out.stdout.split()

    assert called(1) == ["2"] and called(1) == ["2", "1"] and called(2) == ["3"]


@PRECISIONS
@pytest.mark.parametrize("T", LENGTHS)
def test_kernel_with_a_state_slow_twin(T, dtype, tol):
    """A kernel without initial state and whose final state has no gradient serves both, by the tokens around the
    sequence."""
    inputs, calls = selective_inputs(T, dtype), []

    def kernel(x, delta, A, B, C):
        calls.append(x.shape)
        y, _ = naive_selective(x.mT, delta.mT, A, B.mT, C.mT, x.new_zeros(len(x), *A.shape))
        return y.mT

    fast, slow = (
        values_and_gradients(lambda *args: with_kernel(kernel, *args), inputs),
        values_and_gradients(naive_selective, inputs),
    )
    assert agree(fast, slow, tol) and calls == [(2, 5, T + 2 * 3)]


def test_linear_scan_gradients_numerically():
    """First and second derivatives, and a decay that all samples and tokens share."""
    inputs = [torch.rand(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (2, 4, 3), (2, 3))]
    assert torch.autograd.gradcheck(linear_scan, inputs) and torch.autograd.gradgradcheck(linear_scan, inputs)
    decay, rest = torch.rand(3, dtype=torch.float64, requires_grad=True), inputs[1:]
    assert torch.autograd.gradcheck(linear_scan, (decay, *rest))
    assert torch.equal(linear_scan(decay, *rest), linear_scan(decay.expand(2, 4, 3), *rest))


@pytest.mark.parametrize(("fn", "make"), [(selective_scan, selective_inputs), (decayed_attention, attention_inputs)])
def test_scans_under_vmap(fn, make):
    """The diagonal schedule runs several layers as one: values and gradients equal those of separate calls."""
    groups = [make(CHUNK + 3), make(CHUNK + 3, dtype=torch.float64)]
    groups[1] = [(t * 0.9).detach().requires_grad_() for t in groups[1]]
    stacked = [torch.stack(parts) for parts in zip(*groups, strict=True)]
    together = values_and_gradients(torch.func.vmap(fn), stacked)
    apart = [fn(*inputs) for inputs in groups]
    assert agree(together[:2], [torch.stack(parts) for parts in zip(*apart, strict=True)], 1e-12)
    draw, shapes = torch.Generator().manual_seed(0), [t.shape for t in together[:2]]
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    loss = sum((out[i] * weights[i][g]).sum() for g, out in enumerate(apart) for i in range(2))
    flat = torch.autograd.grad(loss, [t for inputs in groups for t in inputs])
    assert agree(together[2:], [torch.stack(parts) for parts in zip(flat[:6], flat[6:], strict=True)], 1e-10)


@pytest.mark.parametrize("decay", [0.0, 1e-30, 0.5, 1.0])
def test_extreme_decays(decay, way):
    """No division by products of decays: over 200 tokens whatever decays stays exact and finite, also its gradients."""
    inputs = attention_inputs(200, torch.float32)
    inputs[3] = torch.full_like(inputs[3], decay).requires_grad_()
    found = values_and_gradients(decayed_attention, inputs)
    exact = values_and_gradients(naive_attention, [t.detach().double().requires_grad_() for t in inputs])
    assert all(t.isfinite().all() for t in found) and agree(found, exact, 1e-5)
    x, delta, A, *rest = selective_inputs(200, torch.float32)
    fast = [x, (delta * 1e4).detach().requires_grad_(), A, *rest]
    assert all(t.isfinite().all() for t in values_and_gradients(selective_scan, fast))


class Written(TorchDispatchMode):
    """Counts the elements of all that operations return."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t._base is None)
        return out


@pytest.mark.parametrize(("fn", "make"), [(selective_scan, selective_inputs), (decayed_attention, attention_inputs)])
def test_work_is_linear_in_length(fn, make, way):
    """Forward and backward of four times the tokens write four times the numbers (slicing step by step would write up
    to 16 times)."""
    totals = []
    for T in (8 * CHUNK, 32 * CHUNK):
        inputs = make(T)
        with Written() as written:
            values_and_gradients(fn, inputs)
        totals.append(written.total)
    assert 3.8 < totals[1] / totals[0] < 4.2


def test_selective_scan_keeps_no_states(way):
    """For the way back one state per chunk is kept, not one per token."""
    T, kept = 3 * CHUNK, []
    inputs = selective_inputs(T, E=32, N=8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        selective_scan(*inputs)
    state = inputs[-1].numel()
    assert 0 < sum(kept) <= sum(t.numel() for t in inputs[:-1]) + T // CHUNK * state < T * state / 2


def test_lti(way):
    """T-MAMBA-lti: with constant Delta, B and C the scan is the convolution with the kernel C e^{Delta A j} Delta B."""
    T = 2 * CHUNK + 6
    x, delta, A, b, c, _ = (t.detach() for t in selective_inputs(T))
    delta, b, c = (t[:1, :1] for t in (delta, b, c))
    y, _ = selective_scan(
        x, delta.expand_as(x), A, b.expand(2, T, -1), c.expand(2, T, -1), torch.zeros(2, *A.shape, dtype=x.dtype)
    )
    j = torch.arange(T)[:, None, None]
    kernel_TE = (c[0] * torch.exp(delta[0].mT * A * j) * delta[0].mT * b[0]).sum(-1)
    convolved = torch.stack([(kernel_TE[: t + 1].flip(0) * x[:, : t + 1]).sum(1) for t in range(T)], 1)
    assert torch.allclose(y, convolved, rtol=1e-10, atol=1e-10)


def test_w1(way):
    """T-RWKV-w1: with w = 1 and u = 1 it is unnormalised causal linear attention, (r k^T masked) v."""
    r, k, v, decay, bonus, state = (t.detach() for t in attention_inputs(2 * CHUNK + 6))
    out, final = decayed_attention(r, k, v, torch.ones_like(decay), torch.ones_like(bonus), torch.zeros_like(state))
    scores = torch.einsum("bthk,bshk->bhts", r, k).tril()
    assert torch.allclose(out, torch.einsum("bhts,bshv->bthv", scores, v), rtol=1e-10, atol=1e-10)
    assert torch.allclose(final, torch.einsum("bshk,bshv->bhkv", k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_says_that_numba_is_missing(build, name, installed, monkeypatch):
    """Of the models with a compiled part, on a CPU alone; the command prints the line once for all runs."""
    monkeypatch.setattr(compiled, "installed", lambda: installed)
    for device, told in (("cpu", not installed and name in ("armt", "mamba", "rwkv")), ("cuda", False)):
        messages, module = [], SimpleNamespace(device=torch.device(device), model=build(name))
        Progress(messages.append, None, "loss").on_fit_start(None, module)
        assert [m["event"] for m in messages] == ["warning"] * told
        assert all("pip install 'lit-memory[fast]'" in m["message"] for m in messages)
