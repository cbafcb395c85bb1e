"""Which test shows what an argument or a method does; `test_arguments` fails for one that is not listed here."""

from __future__ import annotations

COVERED = {
    "FullyShardedDataParallel.module": "test_arguments.py::test_the_module_is_wrapped_and_not_copied",
    "FullyShardedDataParallel.process_group": (
        "test_arguments.py::test_process_group_says_who_shares_and_who_is_averaged"
    ),
    "FullyShardedDataParallel.sharding_strategy": (
        "test_arguments.py::test_sharding_strategy_says_what_is_cut_and_how_long_parameters_are_whole"
    ),
    "FullyShardedDataParallel.cpu_offload": (
        "test_arguments.py::test_cpu_offload_keeps_shards_and_gradients_on_the_cpu_and_changes_no_number"
    ),
    "FullyShardedDataParallel.auto_wrap_policy": (
        "test_arguments.py::test_auto_wrap_policy_says_which_children_are_units"
    ),
    "FullyShardedDataParallel.backward_prefetch": (
        "test_sharding.py::test_backward_prefetch_pre_gathers_before_the_gradients_of_the_unit_behind"
    ),
    "FullyShardedDataParallel.mixed_precision": (
        "test_arguments.py::test_mixed_precision_computes_and_reduces_in_other_types_and_stores_in_the_own"
    ),
    "FullyShardedDataParallel.ignored_modules": (
        "test_arguments.py::test_what_is_ignored_is_neither_sharded_nor_averaged"
    ),
    "FullyShardedDataParallel.param_init_fn": "test_arguments.py::test_param_init_fn_makes_what_is_on_meta",
    "FullyShardedDataParallel.device_id": "test_arguments.py::test_device_id_is_where_parameters_are_put",
    "FullyShardedDataParallel.sync_module_states": (
        "test_arguments.py::test_sync_module_states_gives_all_ranks_those_of_the_first"
    ),
    "FullyShardedDataParallel.forward_prefetch": (
        "test_sharding.py::test_forward_prefetch_gathers_the_next_unit_before_this_one_runs"
    ),
    "FullyShardedDataParallel.limit_all_gathers": "test_arguments.py::test_limit_all_gathers_holds_gathers_back",
    "FullyShardedDataParallel.use_orig_params": "test_arguments.py::test_use_orig_params_says_what_an_optimizer_sees",
    "FullyShardedDataParallel.ignored_states": (
        "test_arguments.py::test_what_is_ignored_is_neither_sharded_nor_averaged"
    ),
    "FullyShardedDataParallel.device_mesh": "test_arguments.py::test_device_mesh_says_it_too",
    "FullyShardedDataParallel.check_is_root()": "test_config.py::test_the_first_to_run_is_the_root",
    "FullyShardedDataParallel.fsdp_modules()": "test_config.py::test_modules_in_depth_first_order",
    "FullyShardedDataParallel.apply()": "test_config.py::test_apply_sees_whole_parameters_and_keeps_what_it_writes",
    "FullyShardedDataParallel.set_state_dict_type()": ("test_config.py::test_settings_are_given_back_and_asked_for"),
    "FullyShardedDataParallel.get_state_dict_type()": ("test_config.py::test_settings_are_given_back_and_asked_for"),
    "FullyShardedDataParallel.state_dict_type()": "test_config.py::test_g2_settings_come_back_after_an_exception",
    "FullyShardedDataParallel.summon_full_params()": (
        "tools/test_summon_full_params.py::test_values_names_and_gradients_are_the_unsharded_models"
    ),
    "FullyShardedDataParallel.named_buffers()": (
        "tools/test_summon_full_params.py::test_names_lose_the_wrappers_segment_only_inside"
    ),
    "FullyShardedDataParallel.named_parameters()": (
        "test_arguments.py::test_use_orig_params_says_what_an_optimizer_sees"
    ),
    "FullyShardedDataParallel.no_sync()": (
        "test_comm_hooks.py::test_accumulation_in_and_out_of_no_sync_calls_the_hook_once_a_reduction"
    ),
    "FullyShardedDataParallel.clip_grad_norm_()": (
        "tools/test_clip_grad_norm.py::test_norm_and_clipped_gradients_are_those_of_the_unsharded_model"
    ),
    "FullyShardedDataParallel.register_comm_hook()": ("test_comm_hooks.py::test_what_a_hook_writes_is_the_gradient"),
    "FullyShardedDataParallel._unshard()": "test_config.py::test_parameters_can_be_gathered_ahead_of_forward",
    "FullyShardedDataParallel._wait_unshard_streams_on_current_stream()": (
        "test_config.py::test_parameters_can_be_gathered_ahead_of_forward"
    ),
    "FullyShardedDataParallel._reset_lazy_init()": "test_config.py::test_lazy_initialisation_can_be_undone",
    "FullyShardedDataParallel._deregister_orig_params_ctx()": (
        "test_arguments.py::test_flat_parameters_may_be_shown_instead_of_original_ones"
    ),
    "fully_shard.module": "test_arguments.py::test_fully_shard_returns_its_module_or_its_modules",
    "fully_shard.mesh": "test_arguments.py::test_mesh_of_two_dimensions_replicates_over_the_first",
    "fully_shard.reshard_after_forward": (
        "test_arguments.py::test_reshard_after_forward_says_what_backward_gathers_again"
    ),
    "fully_shard.shard_placement_fn": "test_arguments.py::test_shard_placement_fn_says_which_dimension_is_cut",
    "fully_shard.mp_policy": "test_arguments.py::test_mp_policy_says_what_types_compute_and_come_out",
    "fully_shard.offload_policy": "test_arguments.py::test_offload_policy_keeps_shards_and_gradients_on_the_cpu",
    "fully_shard.ignored_params": "test_arguments.py::test_ignored_params_stay_plain_and_are_not_averaged",
    "fully_shard.dp_mesh_dims": (
        "fsdp2/test_fully_shard.py::test_dtensors_on_the_mesh_of_everything_train_as_whole_ones"
    ),
    "FSDPModule._apply": "test_arguments.py::test_moving_to_another_type_moves_the_shards",
    "FSDPModule.named_parameters": (
        "test_arguments.py::test_after_a_failed_backward_named_parameters_are_the_sharded_ones"
    ),
    "FSDPModule.state_dict": "fsdp2/test_fully_shard.py::test_state_dicts_hold_dtensors_that_load_again",
    "FSDPModule.unshard": "fsdp2/test_fully_shard.py::test_unshard_gathers_one_module_and_reshard_frees_it",
    "FSDPModule.reshard": "fsdp2/test_fully_shard.py::test_unshard_gathers_one_module_and_reshard_frees_it",
    "FSDPModule.reset_iter_state": "fsdp2/test_fully_shard.py::test_after_an_exception_the_next_iteration_works",
    "FSDPModule.set_reshard_after_forward": (
        "fsdp2/test_fully_shard.py::test_parameters_are_kept_between_passes_as_was_set"
    ),
    "FSDPModule.set_reshard_after_backward": (
        "fsdp2/test_fully_shard.py::test_parameters_are_kept_between_passes_as_was_set"
    ),
    "FSDPModule.set_keep_unsharded_storage": (
        "fsdp2/test_fully_shard.py::test_kept_storage_has_the_same_addresses_in_every_step"
    ),
    "FSDPModule.set_unshard_in_backward": (
        "fsdp2/test_fully_shard.py::test_backward_does_without_parameters_that_it_is_told_it_does_not_need"
    ),
    "FSDPModule.set_modules_to_forward_prefetch": (
        "fsdp2/test_fully_shard.py::test_prefetching_follows_the_lists_that_were_set"
    ),
    "FSDPModule.set_modules_to_backward_prefetch": (
        "fsdp2/test_fully_shard.py::test_prefetching_follows_the_lists_that_were_set"
    ),
    "FSDPModule.set_requires_gradient_sync": (
        "fsdp2/test_fully_shard.py::test_gradients_accumulate_without_reduction_until_it_is_required"
    ),
    "FSDPModule.set_requires_all_reduce": (
        "fsdp2/test_fully_shard.py::test_replicas_are_summed_over_only_when_that_is_required"
    ),
    "FSDPModule.set_is_last_backward": (
        "fsdp2/test_fully_shard.py::test_microbatches_may_say_which_backward_is_the_last"
    ),
    "FSDPModule.set_manual_backward_finalization": (
        "fsdp2/test_fully_shard.py::test_gradients_of_manual_finalization_have_the_same_bits"
    ),
    "FSDPModule.finalize_backward": (
        "fsdp2/test_fully_shard.py::test_a_unit_whose_inputs_have_no_gradient_is_reduced_by_finalize_backward"
    ),
    "FSDPModule.set_gradient_divide_factor": (
        "fsdp2/test_fully_shard.py::test_gradients_are_divided_by_the_factor_that_was_set"
    ),
    "FSDPModule.set_reduce_scatter_divide_factor": (
        "test_arguments.py::test_the_old_name_of_the_divisor_is_deprecated_and_works"
    ),
    "FSDPModule.set_force_sum_reduction_for_comms": "test_arguments.py::test_sums_only_give_the_same_mean",
    "FSDPModule.set_reduce_scatter_unused_params": (
        "fsdp2/test_fully_shard.py::test_parameters_unused_on_some_ranks_get_the_mean_and_unused_ones_wanted_zeros"
    ),
    "FSDPModule.set_reduce_scatter_max_input_buffers": (
        "fsdp2/test_fully_shard.py::test_more_reductions_may_be_under_way"
    ),
    "FSDPModule.set_custom_all_gather": "fsdp2/test_fully_shard.py::test_collectives_of_ones_own_are_used",
    "FSDPModule.set_custom_reduce_scatter": "fsdp2/test_fully_shard.py::test_collectives_of_ones_own_are_used",
    "FSDPModule.set_all_reduce_hook": "fsdp2/test_fully_shard.py::test_a_hook_changes_averaged_gradients",
    "FSDPModule.set_separate_reduce_scatter_group": (
        "fsdp2/test_fully_shard.py::test_reductions_can_have_a_group_of_their_own"
    ),
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": (
        "test_arguments.py::test_options_of_nccl_are_refused_by_name"
    ),
    "FSDPModule.set_symm_mem_for_comm": "test_arguments.py::test_options_of_nccl_are_refused_by_name",
    "FSDPModule.set_post_optim_event": (
        "test_arguments.py::test_an_event_behind_the_optimizer_may_be_set_and_changes_no_number"
    ),
    "FSDPModule._set_unshard_async_op": ("test_arguments.py::test_gathers_by_themselves_or_not_change_no_number"),
}
