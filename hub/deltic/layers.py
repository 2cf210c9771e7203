"""Layers for kernelize(): forward alone, with the signatures of transformers' functions.

Their names are those under which transformers looks for them in other repositories. `chunk_size`
changes rounding only, and is left to the operator. An unknown keyword is a TypeError.
"""

import torch

from ._deltic.fla.ops import gated_delta_rule, kda


class chunk_gated_delta_rule(torch.nn.Module):
    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return gated_delta_rule.chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


class recurrent_gated_delta_rule(torch.nn.Module):
    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return gated_delta_rule.fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


class chunk_kimi_delta_attention(torch.nn.Module):
    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return kda.chunk_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )


class recurrent_kimi_delta_attention(torch.nn.Module):
    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        return kda.fused_recurrent_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )
