"""vLLM's engine as generators and scorers use it, in the task's process or in one of its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.engines.base import EngineFacts
from stages.engines.vllm_setup import StartedVllm, Unsupported, is_refusal
from stages.engines.vllm_worker import peak_resident_gib


class VllmEngine:
    """vLLM's engine, with requests named by their index."""

    def __init__(self, started: StartedVllm) -> None:
        self._started = started
        self._engine = started.engine
        self._names: dict[str, int] = {}
        self._count = 0
        self._adapter: Any = None

    def add(self, index: int, tokens: Sequence[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._count += 1  # vLLM's names differ, since an index comes again with every turn
        self._names[str(self._count)] = index
        name, prompt = str(self._count), tokens_input(list(tokens))
        with self._started.errors():
            self._engine.add_request(name, prompt, params, lora_request=self._adapter)

    def reset(self) -> bool:
        """Throw away requests and what was computed for them; keep what was compiled for other tasks. Returns
        whether nothing is left."""
        self.abort()
        self._started.kept.publish()
        self._call("forget_peak_memory")
        return self._forget()

    def _call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Return what a method of :class:`stages.engines.vllm_worker.WorkerExtension`, or of vLLM's worker,
        returns in each worker."""
        with self._started.errors():
            return list(self._engine.collective_rpc(method, args=arguments, kwargs=named))

    def _forget(self) -> bool:
        """Throw away what was computed for prompts. Returns whether nothing is left."""
        with self._started.errors():
            is_empty = bool(self._engine.reset_prefix_cache())
        if is_empty:
            self._call("give_back_cache")
        return is_empty

    def load(self, directory: str) -> None:
        """Replace the model's weights; what was computed with the old ones is thrown away."""
        shared = self._call("names_of_shared_weights")
        self._call("reload_weights", weights_path=directory)
        if self._call("names_of_shared_weights") != shared:
            raise RuntimeError("vLLM has taken layers apart that share a weight")
        self._call("pack_shared_weights")
        if not self._forget():
            raise RuntimeError("vLLM has kept what it computed with other weights")

    def put_on(self, adapter: Path) -> list[int]:
        """Load an adapter, for all requests, in place of the one before. Returns of each worker how many
        weights it has changed."""
        from vllm.lora.request import LoRARequest

        with self._started.errors():
            if self._adapter is not None:
                self._engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = LoRARequest("policy", 1, str(adapter))
            self._engine.add_lora(self._adapter)
        return self._call("num_adapted_weights")

    def hide(self, ids: Sequence[int]) -> None:
        """Give ids that no response may have the probability 0."""
        if ids:
            self._call("hide_ids", list(ids))

    @property
    def can_classify(self) -> bool:
        with self._started.errors():
            return "classify" in self._engine.get_supported_tasks()

    @property
    def cache_tokens(self) -> int:
        """Tokens that the key-value cache has room for."""
        cache = self._engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> Iterator[tuple[int, Any]]:
        """Compute one step; yield what finished in it. Raises Unsupported if no kernel fits the model."""
        try:
            with self._started.errors():
                outputs = self._engine.step() if self.is_busy else ()
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if not is_refusal(text):
                raise
            raise Unsupported(f"vLLM cannot compute it: {text}; take engine=transformers for it") from error
        for output in outputs:
            if output.finished:
                yield self._names.pop(output.request_id), output

    @property
    def _has_ended(self) -> bool:
        return self._started.note is not None and bool(self._engine.engine_core.resources.engine_dead)

    def abort(self) -> None:
        """Throw away unfinished requests, and what was computed for them. Of a process that has ended nothing
        is left."""
        if self._has_ended:
            self._names.clear()
            return
        with self._started.errors():
            if self._names:
                self._engine.abort_request(list(self._names))
                self._names.clear()
            while self.is_busy:
                self._engine.step()
        self._forget()

    def facts(self) -> EngineFacts:
        workers = self._call("facts")
        names = ("model_runner", "async_scheduling")
        numbers = {name: float(workers[0][name]) for name in names}
        return EngineFacts(
            numbers | {"own_process": float(self._started.note is not None)},
            memory_gib=peak_resident_gib({worker["pid"] for worker in workers}),
            gpu_memory_gib=max(worker["peak_gpu_bytes"] for worker in workers) / 2**30,
        )

    def close(self) -> None:
        core = self._engine.engine_core
        del self._engine
        if self._started.note is None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            core.shutdown()
            cleanup_dist_env_and_memory()
        else:
            from stages.engines.vllm_process import shut_down

            shut_down(core)
        self._started.kept.publish()
        self._started.kept.discard()
