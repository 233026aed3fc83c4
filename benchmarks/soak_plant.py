"""A scheduler that loses a block, for ``soak_serve --plant block``."""

from vllm.v1.core.sched.scheduler import Scheduler

AT = 200


class Forgetful(Scheduler):
    """Takes a block in step ``AT`` that no request has, and never gives it back."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.soak_steps = 0

    def schedule(self, *args, **kwargs):
        """vLLM's own."""
        pool = self.kv_cache_manager.block_pool
        self.soak_steps += 1
        if self.soak_steps >= AT and pool.get_num_free_blocks():
            pool.get_new_blocks(1)
            self.soak_steps = -(1 << 62)
        return super().schedule(*args, **kwargs)
