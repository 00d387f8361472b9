"""Expert parallelism inside Transformers: an `EPImplementation` that leaves the exchange of tokens to the layer.

The ranks of a tensor-parallel group hold the same batch: each passes its slice of it, and the results are gathered.
Ranks with batches of their own pass them as they are; they may differ in size. Either way a token crosses once to each
rank that it needs, and no split sizes are read back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megamoe.errors import EngineError
from megamoe.integrations.transformers.experts import NAMES, QUANTIZED, forward

__all__ = ["make_implementation"]

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def make_implementation(base: type[Any]) -> type[Any]:
    """The implementation as a subclass of the host's `EPImplementation`."""

    class MegaMoEExpertParallel(base):  # type: ignore[misc]
        """Tokens to the experts' ranks and back by one `MegaMoE` call. Inference only."""

        def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            config: Any = getattr(self.experts, "config", None)
            name = getattr(config, "_experts_implementation", None)
            if name not in NAMES:
                raise EngineError(
                    "experts_implementation",
                    name,
                    " or ".join(repr(one) for one in NAMES) + ' with ep_implementation="megamoe"',
                    "Pass both to from_pretrained, or another ep_implementation.",
                )
            quantize, group = name == QUANTIZED, self.ep_mesh.get_group()
            sharers: int = self.tp_mesh.size()
            if sharers == 1:
                return forward(self.experts, hidden_states, top_k_index, top_k_weights, quantize=quantize, group=group)
            tokens = hidden_states.shape[0]
            most = -(-tokens // sharers)
            first = self.tp_mesh.get_local_rank() * most
            mine = slice(min(first, tokens), min(first + most, tokens))
            part = forward(
                self.experts,
                hidden_states[mine],
                top_k_index[mine],
                top_k_weights[mine],
                quantize=quantize,
                group=group,
                # Ranks that share this batch all know the largest slice; with several batches in the group nobody does.
                most=most if self.shares_batch else None,
            )
            part = torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[0]))
            whole = part.new_empty(most * sharers, part.shape[1])
            _all_gather(whole, part.contiguous(), group=self.tp_mesh.get_group())
            return whole[:tokens]

    return MegaMoEExpertParallel
