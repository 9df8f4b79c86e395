"""Synthetic GPU traces: events that no GPU made, written in the format that kineto documents.

They test how a GPU's trace is read. What a real GPU does is tested on one, in `tests/gpu/test_diagnose_on_cuda.py`.
"""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.findings.trace import Trace
from helpers.findings.trace_file import read_trace

HOST, BACKWARD_THREAD, STREAM = (100, 100), (100, 200), (0, 7)
LAUNCH_US = 4.0
BF16, FP32 = "c10::BFloat16", "float"


def parse(events: list[dict[str, Any]], **about: Any) -> Trace:
    """The trace of a file with these events, and with `about` around them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps(about | {"traceEvents": events}))
        return read_trace(path)


class Synthetic:
    """A host with a clock, and a device that does what was launched, in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1000.0  # the host's clock, µs
        self.free = 0.0  # when the device will have done all that was launched
        self.thread = HOST
        self._launches = 0
        self._steps = 0

    def write(self, cat: str, name: str, begin: float, end: float, track: tuple[int, int], **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": track[0], "tid": track[1], "ts": begin, "dur": end - begin}
            | {"args": args}
        )

    @contextmanager
    def inside(self, cat: str, name: str, **args: Any):
        begin = self.now
        yield
        self.now += 1
        self.write(cat, name, begin, self.now, self.thread, **args)

    @contextmanager
    def step(self):
        with self.inside("user_annotation", f"ProfilerStep#{self._steps}"):
            yield
        self._steps += 1

    @contextmanager
    def backward(self, node: str, sequence: int):
        """Autograd's thread works, and the host waits for it."""
        self.thread = BACKWARD_THREAD
        with self.inside("cpu_op", f"autograd::engine::evaluate_function: {node}", **{"Sequence number": sequence}):
            yield
        self.thread = HOST

    def op(self, name: str, dims=(), dtype: str = BF16, values=(), sequence: int | None = None, **launch: Any) -> None:
        """An op that launches a kernel (kernel=NAME, us=…), a copy (copy=NAME), or nothing."""
        args = {"Input Dims": list(dims), "Input type": [dtype] * len(dims), "Concrete Inputs": list(values)}
        args |= {} if sequence is None else {"Sequence number": sequence}
        with self.inside("cpu_op", name, **args):
            self.launch(**launch)

    def launch(self, kernel: str = "", us: float = 300.0, copy: str = "", waits: bool = False) -> None:
        if kernel or copy:
            self._launches += 1
            begin = max(self.now + LAUNCH_US, self.free)
            self.free = begin + us
            cat, call = ("gpu_memcpy", "cudaMemcpyAsync") if copy else ("kernel", "cudaLaunchKernel")
            extra = {"bytes": 2**20} if copy else {}
            self.write(cat, copy or kernel, begin, self.free, STREAM, correlation=self._launches, **extra)
            blocks = "Pageable" in copy  # the call returns when all queued work and the copy are done
            self.call(call, self.free - self.now if blocks else LAUNCH_US, correlation=self._launches)
        if waits:
            self.call("cudaStreamSynchronize", max(self.free - self.now, 3.0))

    def call(self, name: str, us: float, **args: Any) -> None:
        self.write("cuda_runtime", name, self.now, self.now + us, self.thread, **args)
        self.now += us

    def train_step(self, number: int, dtype: str = BF16, kernel: str = "sm90_xmma_gemm_bf16bf16_bf16f32") -> None:
        """Loader, a product forward and backward, a fused optimizer: nothing to complain of in bf16."""
        with self.inside("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            self.now += 10
        self.op("aten::to", copy="Memcpy HtoD (Pinned -> Device)", us=5.0)
        self.op("aten::mm", [[256, 512], [512, 1024]], dtype, sequence=2 * number, kernel=kernel)
        self.op("aten::mean", [[256, 1024]], dtype, sequence=2 * number + 1, kernel="reduce_kernel", us=50.0)
        with self.backward("MeanBackward0", 2 * number + 1):
            self.op("aten::div", [[]], dtype, kernel="elementwise_kernel", us=50.0)
        with self.backward("MmBackward0", 2 * number):
            self.op("aten::mm", [[512, 256], [256, 1024]], dtype, kernel=kernel)
        with self.inside("user_annotation", "Optimizer.step#AdamW.step"):
            self.op("aten::_fused_adamw_", kernel="multi_tensor_apply_kernel", us=100.0)
