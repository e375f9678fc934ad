"""What is left in blocks of the key-value cache: cleared before anybody else uses them.

Attention multiplies what it masks by 0, and 0 times NaN is NaN: the numbers that a text leaves in a
block where another one has none yet are not without effect if they are not finite. A text may be
cancelled or preempted before anybody sees that they are not, so blocks are not cleared where they
are freed but where they are taken, whoever had them: what vLLM does for some models on its own.
"""

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig


def clear_new_blocks() -> None:
    """Have vLLM clear each block that a request takes, on every rank, before it is first read.

    It counts for caches that are set up later in this process. Blocks of the prefix cache are whole
    and stay as they are. States of state space layers are no blocks of this kind: vLLM begins a
    text with zeros of its own.
    """
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


class FreedPrefixes:
    """Forget what the prefix cache holds of a request that has ended in the last step, or runs.

    A hit would be one of an equal request and give what that gives by itself, NaN. So this is no
    protection of others; it leaves the cache to what can be used.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._free = manager.free
        self._freed: dict[str, Any] = {}
        manager.free = self.free

    def free(self, request: Any) -> None:
        """Free a request's blocks as vLLM does, in place of its own function; note which."""
        request_id = request.request_id
        self._freed[request_id] = self._manager.coordinator.get_blocks(request_id)
        self._free(request)

    def forget(self) -> None:
        """Forget which blocks were freed: the next step that ends frees others.

        Where the step after it has begun, others may have them when they are asked for. Those lose
        no more than what the cache knows of theirs.
        """
        self._freed = {}

    def evict(self, request_id: str) -> None:
        """Take the request's blocks out of the prefix cache; those that run with them keep them."""
        groups = self._freed.get(request_id) or self._manager.coordinator.get_blocks(request_id)
        self._manager.evict_blocks({block.block_id for blocks in groups for block in blocks})
