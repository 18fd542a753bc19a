"""Every private PyTorch interface f8fx uses, in one place.

Checked on torch 2.11 to 2.15. Each entry says what it is used for, so that a reader of a
newer torch knows what to look for when one has moved. Nothing outside this package imports a name
with a leading underscore from torch, or a module under ``torch._inductor``, ``torch._functorch``,
``torch._dynamo`` or ``torch._subclasses``.

| module | of torch |
| --- | --- |
| ``versions`` | which releases, and what differs between them |
| ``tensors`` | fake tensors, symbolic sizes, operators |
| ``trees`` | nested lists, tuples and dicts |
| ``devices`` | GPUs |
| ``distributed`` | collectives, process groups and their store |
| ``fsdp`` | FSDP and DTensor |
| ``dynamo`` | Dynamo |
| ``aot`` | AOTAutograd and its partitioner |
| ``donated`` | what backwards may overwrite |
| ``inductor`` | Inductor around a compile |
| ``lowering`` | Inductor's lowerings and IR |
| ``pointwise`` | Inductor's values as expressions |
| ``realizing`` | what Inductor writes to memory rather than compute it again |
| ``tuned_graphs`` | Inductor's options for graphs with certain operators |
| ``scheduling`` | Inductor's scheduler: kernels that share a launch, and what may be fused |
| ``combining``, ``live_bytes`` | Inductor's scheduler: which kernels share a launch, and memory |
| ``optimizers`` | where in an optimizer's step a program is |
| ``patch`` | attributes replaced for the length of a block |
"""

from .aot import (
    CustomPartitionerFn,
    aot_backend,
    boxed,
    eager_backward_lowering,
    input_position,
    min_cut_partition,
    overwritten_inputs,
)
from .devices import busy_wait, is_present, multiplies_float8_slowly
from .distributed import (
    assert_on_device,
    c10d,
    carries_float8,
    fake_store,
    group_backend,
    group_backends,
    group_rank,
    group_ranks,
    group_timeout,
    is_collective,
    key_local_tensors,
    mesh_on_paper,
    place_in_mesh,
    process_group,
    process_store,
    process_store_read,
    same_on_all,
)
from .donated import repeatable_backwards
from .dynamo import (
    begins_anew,
    cause_of,
    copy_of_graph,
    flex_attention_with_gradients,
    forget_traced_regions,
    keep_out_of_packages,
    keeps_its_address,
    mark_as_dynamo_input,
    mark_stock_wrappers,
    modules_on_stack,
    opens_autocast,
    uncompiled,
    unnoticed_by_dynamo,
    untraced,
)
from .fsdp import (
    backward_was_interrupted,
    fsdp_parameters,
    gather_group,
    gather_outputs,
    keep_padded_shard,
    local_part,
    local_tensor,
    managed_by_fsdp,
    move_pre_hook_first,
    own_parameters,
    pre_hooks,
    replace_local_tensor,
    reshard_group,
    reshards_after_forward,
    set_gather_outputs,
    sharded_parameter,
)
from .inductor import (
    CustomGraphPass,
    as_strided_keeps_offsets,
    compile_fx_module,
    compiles_ahead_of_time,
    differs_from_default,
    express_min_max_as_where,
    inductor_cache_dir,
    inductor_cache_hits,
    inductor_config,
    inductor_mode_options,
    inductor_modes,
    inductor_option_type,
    joint_custom_pre_pass,
    just_in_time,
    runs_joint_passes,
    settings,
)
from .live_bytes import live_bytes
from .lowering import (
    Lowering,
    Parts,
)
from .optimizers import optimizer_hooks_run, optimizer_step_runs
from .patch import patched_attribute
from .pointwise import EXPRESSION_IMPORTS, Expressions, expressions, jit_function, tuned
from .scheduling import sums_both_ways
from .tensors import (
    as_it_runs,
    carry_grad_dtype,
    detect_fake_mode,
    disabled_torch_function,
    fake_like,
    fake_tensor_mode,
    fake_view,
    in_backward,
    infinity_norms,
    is_composite,
    is_fake,
    is_higher_order,
    is_of_torch,
    is_operator,
    outside_of_tracers,
    saved_tensors_are_read,
    schema_of,
    size_hint,
    statically_true,
    storage_key,
    unlogged_fake_errors,
    version_counter,
    wrapper_tensor,
)
from .trees import tree_leaves, tree_map, tree_map_only
from .tuned_graphs import tune_graphs_of
from .versions import (
    SUPPORTED_TORCH,
    check_version,
    supports_rowwise_scaled_mm,
)
from .writes import gives_views, stands_for_write, written, written_constants

__all__ = [
    "EXPRESSION_IMPORTS",
    "SUPPORTED_TORCH",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "Expressions",
    "Lowering",
    "Parts",
    "aot_backend",
    "as_it_runs",
    "as_strided_keeps_offsets",
    "assert_on_device",
    "backward_was_interrupted",
    "begins_anew",
    "boxed",
    "busy_wait",
    "c10d",
    "carries_float8",
    "carry_grad_dtype",
    "cause_of",
    "check_version",
    "compile_fx_module",
    "compiles_ahead_of_time",
    "copy_of_graph",
    "detect_fake_mode",
    "differs_from_default",
    "disabled_torch_function",
    "eager_backward_lowering",
    "express_min_max_as_where",
    "expressions",
    "fake_like",
    "fake_store",
    "fake_tensor_mode",
    "fake_view",
    "flex_attention_with_gradients",
    "forget_traced_regions",
    "fsdp_parameters",
    "gather_group",
    "gather_outputs",
    "gives_views",
    "group_backend",
    "group_backends",
    "group_rank",
    "group_ranks",
    "group_timeout",
    "in_backward",
    "inductor_cache_dir",
    "inductor_cache_hits",
    "inductor_config",
    "inductor_mode_options",
    "inductor_modes",
    "inductor_option_type",
    "infinity_norms",
    "input_position",
    "is_collective",
    "is_composite",
    "is_fake",
    "is_higher_order",
    "is_of_torch",
    "is_operator",
    "is_present",
    "jit_function",
    "joint_custom_pre_pass",
    "just_in_time",
    "keep_out_of_packages",
    "keep_padded_shard",
    "keeps_its_address",
    "key_local_tensors",
    "live_bytes",
    "local_part",
    "local_tensor",
    "managed_by_fsdp",
    "mark_as_dynamo_input",
    "mark_stock_wrappers",
    "mesh_on_paper",
    "min_cut_partition",
    "modules_on_stack",
    "move_pre_hook_first",
    "multiplies_float8_slowly",
    "opens_autocast",
    "optimizer_hooks_run",
    "optimizer_step_runs",
    "outside_of_tracers",
    "overwritten_inputs",
    "own_parameters",
    "patched_attribute",
    "place_in_mesh",
    "pre_hooks",
    "process_group",
    "process_store",
    "process_store_read",
    "repeatable_backwards",
    "replace_local_tensor",
    "reshard_group",
    "reshards_after_forward",
    "runs_joint_passes",
    "same_on_all",
    "saved_tensors_are_read",
    "schema_of",
    "set_gather_outputs",
    "settings",
    "sharded_parameter",
    "size_hint",
    "stands_for_write",
    "statically_true",
    "storage_key",
    "sums_both_ways",
    "supports_rowwise_scaled_mm",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tune_graphs_of",
    "tuned",
    "uncompiled",
    "unlogged_fake_errors",
    "unnoticed_by_dynamo",
    "untraced",
    "version_counter",
    "wrapper_tensor",
    "written",
    "written_constants",
]
