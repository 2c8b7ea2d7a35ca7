"""A step of a peer in a CUDA graph: recorded once, then told to the GPU as one.

As torch's notes on CUDA graphs and torchtitan (`torchtitan/distributed/cuda_graph.py`, 2026-08) do it: eager steps on
the stream that is recorded later, inputs in memory of their own, no gradients when the recording begins. On a CPU,
which has no graphs, each step runs as the recorded one would.
"""

import torch

from benchmarks.engines import Traffic
from benchmarks.engines.plain import Batches, TorchTraining


class GraphedTraining:
    """A training whose steps are replayed.

    Args:
        num_eager_steps: before the one that is recorded.
        whole_step: record forward to optimizer step. False: forward and backward, as torchtitan does.
    """

    def __init__(self, training: TorchTraining, *, whole_step: bool, num_eager_steps: int) -> None:
        self._training, self._whole_step = training, whole_step
        self._num_eager_steps = num_eager_steps
        self._parameters = list(training.model.parameters())
        self._on_cuda = training.device_type == "cuda"
        self._stream = torch.cuda.Stream() if self._on_cuda else None
        self._inputs: Batches = []
        """What a graph reads."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros(())
        self._gradients: list[torch.Tensor | None] = []
        """Those that a replay writes; a replay assigns none to its parameter."""

    def step(self, micro_batches: Batches) -> torch.Tensor:
        """See `Engine.step`."""
        if not self._inputs:
            self._inputs = [(ids.clone(), labels.clone()) for ids, labels in micro_batches]
        for kept, batch in zip(self._inputs, micro_batches, strict=True):
            for memory, values in zip(kept, batch, strict=True):
                memory.copy_(values)
        if self._stream is None:
            self._loss = self._recorded()
        elif self._num_eager_steps > 0:
            self._num_eager_steps -= 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._loss = self._recorded()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            self._replay(self._stream)
        if not self._whole_step:
            self._training.update()
        return self._loss

    def traffic(self) -> Traffic | None:
        """See `Engine.traffic`."""
        return None

    def _recorded(self) -> torch.Tensor:
        loss = self._training.accumulate(self._inputs)
        if self._whole_step:
            self._training.update()
        return loss

    def _replay(self, stream: torch.cuda.Stream) -> None:
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog, may ask the device meanwhile.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._loss = self._recorded()
            self._gradients = [parameter.grad for parameter in self._parameters]
        self._graph.replay()
        if not self._whole_step:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
