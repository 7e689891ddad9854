"""What a traced operation or kernel is taken for, and the time that counts as its."""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from finetune.planning import planner
from finetune.profiling import profiler, recommendations, trace_analysis, traced_step
from finetune.recipe import loader
from support.paths import QUICKSTART
from support.profiles import GPU

SCORES, QUERIES, HIDDEN = [2, 32, 2048, 2048], [2, 32, 2048, 64], [4096, 2048]


class Recorded:
    """Events as torch's profiler records them on a GPU: operations, each with its kernels, in turn."""

    def __init__(self) -> None:
        self.events: list[FunctionEvent] = []
        self.clock = 0

    def operation(self, name: str, shapes: Any = (), around: str = "", **kernels: int) -> None:
        """Args: kernels: microseconds, by a key of KERNELS."""
        made = [FunctionEvent(1, each, 0, 0, 1) for each in (name, around)]
        made[0].input_shapes = shapes
        made[0].set_cpu_parent(made[1])
        self.events.append(made[0])
        for key, lasts in kernels.items():
            self.kernel(KERNELS[key], lasts)
            made[0].append_kernel(KERNELS[key], 0, lasts)

    def kernel(self, name: str, lasts: int, mark: bool = False) -> None:
        times = self.clock, self.clock + lasts
        on_gpu: dict[str, Any] = {"device_type": DeviceType.CUDA, "use_device": "cuda"}
        self.events.append(FunctionEvent(2, name, 7, *times, **on_gpu, is_user_annotation=mark))
        self.clock += 0 if mark else lasts


KERNELS = {  # as an H100 names them
    "nvjet": "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT",
    "cutlass": "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn>(Params)",
    "softmax": "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>",
    "softmax_back": "void (anonymous namespace)::softmax_warp_backward<float, float, float, 11, false>",
    "pass_": "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<MulFunctor> >",
    "copied": "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)",
    "loss": "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, LogSoftMaxForwardEpilogue>",
}


def eager_step() -> list[Any]:
    """A layer of a Llama in eager attention, and its backward; microseconds of attention: 940 of 1,340."""
    step, products = Recorded(), ([64, 2048, 64], [64, 64, 2048])
    step.kernel("forward", 1340, mark=True)
    step.operation("aten::mm", [HIDDEN, [2048, 2048]], "aten::linear", nvjet=100)
    step.operation("aten::mul", [QUERIES, [1, 1, 2048, 64]], pass_=30)  # rotary
    step.operation("aten::bmm", products, "aten::matmul", nvjet=100)
    step.operation("aten::mul", [SCORES, []], pass_=90)
    step.operation("aten::add", [SCORES, [2, 1, 2048, 2048], []], pass_=100)
    step.operation("aten::_softmax", [SCORES, [], []], "aten::softmax", softmax=80)
    step.operation("aten::copy_", [SCORES, SCORES, []], "aten::to", copied=70)
    step.operation("aten::bmm", [[64, 2048, 2048], [64, 2048, 64]], "aten::matmul", cutlass=100)
    step.operation("aten::_log_softmax", [[4096, 32000], [], []], "aten::log_softmax", loss=70)
    step.operation("aten::bmm", [[64, 2048, 64], [64, 64, 2048]], "BmmBackward0", nvjet=101)
    step.operation("aten::_softmax_backward_data", [SCORES, SCORES, [], []], softmax_back=99)
    step.operation("aten::bmm", [[64, 2048, 2048], [64, 2048, 64]], "BmmBackward0", nvjet=200)
    step.operation("aten::mm", [HIDDEN, [2048, 2048]], "MmBackward0", nvjet=200)
    return step.events


def test_eager_attention_is_told_from_other_products_on_a_gpu() -> None:
    """Its products and softmax are kernels that linear layers and losses launch too."""
    ran = trace_analysis.computed(eager_step(), cuda=True)
    spent = dict.fromkeys(("attention", "products", "memory-bound"), 0.0)
    for each in ran:
        spent[each.kind] += each.seconds * 1e6
    assert spent == pytest.approx({"attention": 940, "products": 300, "memory-bound": 100})
    trace = traced_step.Trace(cuda=True)
    trace.traced, trace.waits, trace.steps = 1400e-6, [0.0], [1.0]
    whole = loader.load(QUICKSTART, ["model.attention=eager"])
    found = profiler.shares(trace, ran)
    verdict, lever = recommendations.judge(found, 0.0, "eager", whole, planner.make(whole, GPU, 1))
    assert verdict == "eager attention takes 67% of the step" and lever == "model.attention: auto"


def test_a_compiled_softmax_is_attention_and_a_loss_is_not() -> None:
    assert trace_analysis.kind_of("triton_red_fused__softmax_add_mul_3", None, set()) == "attention"
    assert trace_analysis.kind_of("triton_red_fused__log_softmax_nll_loss_1", None, set()) == "memory-bound"
    assert trace_analysis.kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", None, set()) == "communication"
    fused = FunctionEvent(1, "aten::_scaled_dot_product_attention_math", 0, 0, 1)
    inner = FunctionEvent(1, "aten::mm", 0, 0, 1, input_shapes=[])
    inner.set_cpu_parent(fused)
    assert trace_analysis.kind_of(KERNELS["nvjet"], inner, set()) == "attention"


def test_rows_as_long_as_heads_are_wide_leave_rotary_alone() -> None:
    step = Recorded()
    step.operation("aten::mul", [[2, 4, 64, 64], [1, 1, 64, 64]], pass_=10)
    step.operation("aten::bmm", [[8, 64, 64], [8, 64, 64]], nvjet=10)
    step.operation("aten::_softmax", [[2, 4, 64, 64], [], []], softmax=10)
    kinds = [each.kind for each in trace_analysis.computed(step.events, cuda=True)]
    assert kinds == ["memory-bound", "attention", "attention"]


def test_products_that_run_again_count_with_their_time() -> None:
    """At the peak's own speed a step that runs a layer twice is at the peak, as is a head for all tokens."""
    first = 2.0 * 4096 * 2048 * 2048
    step, once = Recorded(), round(first / 1e15 * 1e6)
    for around in ("aten::linear", "CheckpointFunctionBackward"):
        step.operation("aten::mm", [HIDDEN, [2048, 2048]], around, nvjet=once)
    step.operation("aten::addmm", [[2048], HIDDEN, [2048, 2048], []], "aten::linear", nvjet=once)
    ran = trace_analysis.computed(step.events, cuda=True)
    assert trace_analysis.of_peak(ran, 1e15, None) == pytest.approx(1, rel=0.02)
    step.operation("aten::_scaled_mm", [HIDDEN, [2048, 2048], []], nvjet=once)
    ran = trace_analysis.computed(step.events, cuda=True)
    assert trace_analysis.of_peak(ran, 1e15, 2e15) == pytest.approx(
        0.875, rel=0.02
    )  # in fp8 it could be twice
    assert trace_analysis.of_peak(ran, 1e15, None) == pytest.approx(1, rel=0.02)
    step.operation("mine::product", [HIDDEN], cutlass=5 * once)  # most of the time: no shapes
    assert trace_analysis.of_peak(trace_analysis.computed(step.events, cuda=True), 1e15, 2e15) is None


def test_no_more_is_taken_for_waits_than_the_thread_lost() -> None:
    """New memory makes an operation as slow as another process does; a thread that always ran did it all."""
    events = [
        FunctionEvent(1, "aten::mul", 0, 0, lasts, input_shapes=[[8]]) for lasts in (100,) * 5 + (9100,) * 3
    ]
    for lost, left in ((0.0, 27.8), (9e-3, 18.8), (1.0, 0.8)):
        ran = trace_analysis.computed(events, cuda=False, lost=lost)
        assert sum(each.seconds for each in ran) * 1e3 == pytest.approx(left, abs=0.05)


def test_a_range_on_a_gpu_is_no_kernel() -> None:
    """`forward` spans every kernel in it: counted, it would be most of a step, as passes over memory."""
    step = Recorded()
    step.kernel(KERNELS["nvjet"], 40)
    step.kernel("forward", 90, mark=True)
    step.kernel(KERNELS["pass_"], 40)
    trace = traced_step.Trace(cuda=True)
    trace.traced, trace.waits, trace.steps = 100e-6, [0.0], [1.0]
    found = profiler.shares(trace, trace_analysis.computed(step.events, cuda=True))
    assert found["products"] == pytest.approx(0.4) and found["memory-bound"] == pytest.approx(0.4)
    assert found["launch gaps"] == pytest.approx(0.2)


def test_copies_count_where_nothing_is_computed_beside_them() -> None:
    """On streams of their own: to the CPU and back, and between GPUs."""
    step = Recorded()
    for name, begins, ends in (
        (KERNELS["nvjet"], 0, 40), (KERNELS["pass_"], 50, 60), (KERNELS["nvjet"], 60, 70),
        ("Memcpy DtoH (Device -> Pinned)", 10, 45), ("Memcpy HtoD (Pinned -> Device)", 41, 44),
        ("Memcpy HtoD (Pinned -> Device)", 55, 86),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 65, 80), ("Memcpy DtoD (Device -> Device)", 90, 95),
    ):  # fmt: skip
        step.clock = begins
        step.kernel(name, ends - begins)
    trace = traced_step.Trace(cuda=True)
    trace.traced, trace.waits, trace.steps = 100e-6, [0.0], [1.0]
    found = profiler.shares(trace, trace_analysis.computed(step.events, cuda=True))
    assert found == pytest.approx(
        {"products": 0.5, "memory-bound": 0.15, "attention": 0.0, "communication": 0.1, "data wait": 0.0}
        | {"to the CPU and back": 0.05 + 0.06, "launch gaps": 0.14}
    )
    for offload, lever in (("activations", "speed.offload: auto"), ("auto", "why tensors move in each step")):
        whole = loader.load(QUICKSTART, [f"speed.offload={offload}"])
        said = recommendations.judge(
            found | {"launch gaps": 0.0}, 0.0, "cudnn", whole, planner.make(loader.load(QUICKSTART), GPU, 1)
        )
        assert said[0] == "copies between GPU and CPU memory take 11% of the step" and lever in said[1]
