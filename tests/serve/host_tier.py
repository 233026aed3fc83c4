"""``OffloadingConnector`` without a GPU: vLLM's scheduler, manager and pages, with copies made by the processor.

vLLM's own worker copies with CUDA streams and refuses other devices. Named in the connector's options as
``"spec_name": "HostTier", "spec_module_path": "tests.serve.host_tier"``.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks between the pool and a second one, at once."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        assert all(len(refs) == len(kv_caches.tensors) for refs in kv_caches.group_data_refs[:1])
        self.pool = [held.tensor for held in kv_caches.tensors]
        self.tier = [torch.zeros(chunks, x.shape[1], dtype=x.dtype) for x in self.pool]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self.pool, src_spec, self.tier, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, self.tier, src_spec, self.pool, dst_spec)

    def _copy(self, job_id: int, sources: list[Any], there: Any, targets: list[Any], here: Any) -> bool:
        read, written = (torch.from_numpy(x.block_ids.astype("int64")) for x in (there, here))
        for source, target in zip(sources, targets, strict=True):
            target[written] = source[read]
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class HostTier(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's specification, with the worker above."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker
