"""Which tests are ``slow``: those that repeat a promise of others over more cases.

One table, so that it can be read in one sitting. Each line is a regular expression for names of tests, and
must find some. What it leaves to ``make test`` holds every promise at least once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

SLOW = (
    r"test_coded_weights\.py::test_training_is_that_of_the_library\[(torchao int8, groups|torchao float8)",
    r"test_coded_weights\.py::test_training_is_that_over_decoded_weights\[dtype1-(?!nf4)",
    r"test_coded_weights\.py::test_values_come_back\w+\[(not nested|torchao)",
    # The command trains on images by SFT, too.
    r"test_image_training\.py::test_sft_on_images",
    r"test_image_training\.py::test_(images_of_several_sizes|the_command_plans_the_largest)",
    r"test_policy_trainers\.py::test_grpo_logs_what_trl_does\[(dapo|temperature|entropy|sequence|truncated|cispo|luspo)",
    r"test_policy_trainers\.py::test_adapters_log_what_trl_does",
    r"test_policy_trainers\.py::test_completions_as_long\w+\[RLOO",
    r"test_policy_trainers\.py::test_policies_that_read_images",
    r"test_policy_trainers\.py::test_references_log",
    r"test_policy_trainers\.py::test_a_reference_that_follows\w+\[(RLOO|KTO)",
    r"test_policy_trainers\.py::test_a_training_goes_on\w+\[beside",
    r"test_policy_trainers\.py::test_(the_example_learns|trls_own_script)",
    r"test_lent_models\.py::test_texts_of_a_seq2seq_trainer\[False",
    r"test_policy_trainers\.py::test_a_server_is_handed_the_weights_one_by_one\[RLOO",
    r"test_policy_trainers\.py::test_a_server_is_handed_weights_with_their_adapters",
    r"test_rollout\.py::test_weights_are_handed_over_by_name\w+\[dtype0",
    r"test_experimental_trainers\.py::test_\w+\[(ORPO with|CPO|SimPO|of the teacher|of data)",
    r"test_changed_buffers\.py::test_a_classifier_trains_as_eager_does\[(False|True-0)",
    r"test_rollout\.py::test_a_rollout_is_foretold_once\w+\[llama",
    r"test_trl\.py::test_dpo_beside_adapters_that_change",
    r"test_rollout\.py::test_tokens_are_transformers\w+\[(0.8-dtype0|100.0-dtype1)",
    r"test_train_command\.py::test_a_dry_run_(is_of_the_adapters|of_preferences)",
    r"test_loss_cut\.py::test_trains_as_eager_does\[(detr|mask2former|\w+-least)",
    r"test_own_gradients\.py::test_trains_as_eager_does\[((?!norm|sorted)\w+-ample|straight|scaled|quantised|gated)",
    r"test_own_gradients\.py::test_trains_as_eager_does\[(dirty|looks|shared|same|over|silu_operator|norm_operator)-least",
    r"test_own_gradients\.py::test_of_weights_in_bf16\[(?!norm)",
    r"test_muon\.py::test_trains_bitwise_as_torch_does_and_resumes\[(full|updates|NVMe, clipped)",
    r"test_muon\.py::test_a_mixture_of_experts",
    r"test_optimizers_of_ranks\.py::test_(ranks_step\w+\[3|ranks_train|replicas)",
    # Architectures: two of twelve stay, for shared blocks and for an encoder with its decoder. Experts train,
    # cut into pieces, in test_tile.py.
    r"test_architectures\.py::test_architecture_trains_right\[(?!one block|nn)",
    r"test_architectures\.py::test_architecture_is_refused_by_name\[jetmoe",
    r"test_plan_agrees\.py::test_adapters_and_coded_moments\w+\[(None|lora2|lora4)",
    r"test_unroll\.py::test_unrolled_is_what_a_whole_capture_gives\[(?!llama)",
    r"test_fuse\.py::test_placements_of_an_architecture\[(?!Llama|GPT2|GptOss|Gemma3)",
    r"test_fuse\.py::test_programs_with_fused_kernels_compute_the_same\[(?!llama)",
    r"test_fuse\.py::test_gradients_with_fused_kernels_are_the_same\[gemma3",
    r"test_rotary\.py::test_longrope_turns_where_transformers_does",
    r"test_rotary\.py::test_dynamic_scaling_up_to_the_original_length",
    r"test_packed\.py::test_bounds_are_bitwise_the_mask\[mistral",
    r"test_packed\.py::test_a_mask_beside_positions\w+\[(llama|gemma2-(none|ones, bool|padding|4D))",
    r"test_right_padding\.py::test_what_trl_reads_of_a_program_needs_no_mask\[4[02]",
    r"test_right_padding\.py::test_a_mask_that_more_than_attention_reads_stays\[(?!opt)",
    r"test_right_padding\.py::test_padding_at_the_right_needs_no_mask\[(?!llama|gemma2)",
    r"test_right_padding\.py::test_losses_and_gradients_are_bitwise\w+\[(?!llama|gemma2)",
    r"test_repeated_layers\.py::test_layers_of_a_model_are_traced_once\[True",
    r"/test_padding\.py::test_models_that_mix_positions\w+\[backwards",
    r"/test_padding\.py::test_padded_only_where_the_model_does_not_see_it\[(convbert|bert|fnet|lfm2)",
    r"/test_padding\.py::test_a_length_that_is_the_size_of_another_dimension_is_padded_to\[(Llama|Mamba2)",
    r"/test_padding\.py::test_losses_of_the_user_s_own_do_not_see_padding\[<lambda>[12]",
    r"/test_padding\.py::test_entries_of_the_batch_that_padding_does_not_know\[<lambda>[0-2]",
    r"test_lengths\.py::test_an_epoch_of_random_lengths_needs_few_programs\[(shifted|None)",
    r"test_lengths\.py::test_predictions_of_many_lengths_need_few_programs\[None",
    r"test_substitute\.py::test_models_that_make_their_own_mask_make_it_in_a_capture_too\[LongT5",
    r"test_gated_delta_rule\.py::test_every_model_of_transformers_means_the_same_rule\[.*(?<!qwen3_next\])$",
    r"test_gated_delta_rule\.py::test_(a_graph|loss_and\w+\[(?!qwen3_next))",
    r"test_mamba2_chunk_scan\.py::test_every_model_of_transformers_means_the_same_scan\[.*(?<!mamba2\])$",
    r"test_mamba2_chunk_scan\.py::test_(a_graph|loss)\w+\[(?!mamba2|falcon_h1-left)",
    r"test_functional\.py::test_forms_decompose_as_the_whole_graph_does\[(gpt2|gemma3)",
    r"test_query_chunks\.py::test_memory_grows_with_the_tokens\[0-",
    r"test_draws\.py::test_a_program_trains_as_eager_does_with_the_same_draws\[1GB",
    r"test_requests\.py::test_requests_take_what_the_plan_counts\[(True-llama|False-gemma3)",
    # Loops: a head of one model, a layer of another stay.
    r"test_loops\.py::test_loops_compute_what_whole_functions_do\[(llama-1|llama f|qwen3|gemma3|gpt2)",
    r"test_loops\.py::test_gradients_of_weights_in_bf16_are_rounded_once\[512",
    r"test_loops_of_models\.py::test_loops_of_a_model_compute_what_whole_functions_do\[(BART|gpt_neox)",
    r"test_long\.py::test_a_long_sequence_trains_far_below_what_it_needs_whole\[gpt2",
    r"test_long\.py::test_a_sequence_trains_where_a_64th",
    r"test_long\.py::test_a_refusal_says_what_stays_whole\[dropout",
    r"test_plan_long\.py",
    r"test_long_models\.py",
    r"test_vision_language\.py::test_images_in_other_places_share_a_program",
    r"test_vision_language\.py::test_values_of_a_batch_are_inputs_of_one_program",
    r"test_vision_language\.py::test_each_combination_of_sizes_has_a_program",
    r"test_image_buckets\.py::test_an_epoch_needs",
    r"test_image_buckets\.py::test_natural_images_need_few_programs\[(?!Qwen2\.5-VL-2)",
    # Models and shapes beside plain PyTorch: a model of each family stays at the tight budget.
    r"test_against_eager\.py::test_five_clipped_steps_equal_eager\[plenty-(?!plain)",
    r"test_against_eager\.py::test_five_clipped_steps_equal_eager\[least-(qwen3|gpt2\])",
    r"test_against_eager\.py::test_micro_batches_equal_eager_accumulation\[llama",
    r"test_against_eager\.py::test_immediate_updates_equal_eager\[llama",
    r"test_bf16\.py::test_gradients_are_as_good_as_bf16_eager\[(gemma3|llama)",
    r"test_bf16\.py::test_modules_that_keep_fp32_are_honoured\[deepseek",
    r"test_habits\.py::test_models_handed_over_in_low_precision\[dtype",
    r"test_lent_models\.py::test_(callbacks_read\w+\[lora|what_a_loop)",
    r"test_trainer\.py::test_logs_what_plain_transformers_does\[LoHa",
    r"test_frozen_weights\.py::test_training_is_that_with_masters_of_all\[(1MB-(half|single)|350kB-rounded)",
    r"test_program\.py::test_budget_is_kept_and_predicted\[0\.(5|15)",
    r"test_pretrained\.py::test_trains_as_the_loaded_model_does_and_comes_back\[qwen3",
    r"graph/test_experts\.py::test_(the_backward_keeps|a_cut_bank)",
    r"test_tile\.py::test_a_vocabulary_of_256k_trains_far_below_its_table",
    r"test_tile\.py::test_pieces_of_inputs_in_bf16_are_as_near_as_the_whole",
    r"test_tile\.py::test_bf16_over_tiles_is_as_near_as_bf16_without",
    r"test_tile\.py::test_a_cut_bank_of_experts_is_bitwise_the_whole_one\[(?!mixtral)",
    r"test_rows\.py::test_training_is_bitwise_that_of_eager\[habits(0-2|1-1)",
    r"test_rows\.py::test_gathered_rows_train_as_a_streamed_table\[(True-dtype0|False-dtype1)",
    r"test_nonfinite\.py::test_a_policy_looks_at_losses_and_gradients\[bad[12]-\w+-(None|1\.0)-(two|by hand)",
    r"test_nonfinite\.py::test_a_trainer_logs\w+\[(?!True-1-)",
    # Trainers: the first of each kind stays.
    r"test_trainer\.py::test_logs_what_plain_transformers_does\[(label|compute|no|LoRA|LoKr|experts)",
    r"test_trainer\.py::test_adapters_are_saved_as_peft_saves_them\[\{'(trainable|bias)",
    r"test_trainer\.py::test_predictions_of_many_lengths",
    r"test_trainer\.py::test_hooks_of_a_subclass_do_what_they_do_upstream\[OwnSteps\]",
    r"test_trainer\.py::test_planning_an_evaluation_changes_no_step",
    r"test_trainer\.py::test_prompts_are_learned_and_saved_as_by_peft\[Prefix",
    r"test_trainer\.py::test_prompts_are_learned_and_saved_as_by_peft\[PromptEncoder",
    r"test_trl\.py::test_sft_logs_what_trl_does\[(chats|LoRA|virtual)",
    r"test_trl\.py::test_dpo_logs_what_trl_does\[(LoRA|virtual)",
    r"test_trl\.py::test_dpo_beside_a_reference_that_stays\[of a stream",
    r"test_trl\.py::test_dpo_beside_a_reference_that_is_given\[(an equal|virtual)",
    r"test_packing\.py::test_(packed_chats_do_not_see|a_token_has_the_same_loss)",
    r"test_generate\.py::test_(while_a_trainer|beams_stopping|tokens_are\w+\[gpt2)",
    r"test_predict\.py::test_a_transformers_output_with_labels_and_without_after_each_step\[gpt2",
    r"test_profile\.py::test_profiling_changes_nothing",
    r"test_train_command\.py::test_prompts_are_answered_as_the_model_would_alone",
    r"test_trl\.py::test_trls_own_script",
    # Documentation: the figures of guides are minutes of planning; their commands stay, and the Python of
    # those that show what no other test trains.
    r"test_docs\.py::test_the_python_of_a_guide_runs\[(8b|70b|trl|trainer|rl|vision-language)",
    r"test_docs\.py::test_the_figures_of_a_guide_are_those_of_its_commands\[(?!long)",
    # Inductor: a small model at one budget.
    r"test_inductor\.py::test_a_model_trains_as_well_as_in_eager",
    r"test_inductor\.py::test_the_same_run_gives_the_same_bits",
    r"cuda/test_runtime\.py::test_functions_by_inductor_run_on_the_streams",
    r"cuda/test_runtime\.py::test_training_is_bitwise_that_of_the_cpu_device\[llama",
    r"cuda/test_runtime\.py::test_a_checkpoint_that_is_written\w+\[(clipped-False|immediate-True)",
    r"test_interruptions\.py::test_killed_at_random_moments",
    r"test_export_command\.py::test_a_checkpoint_becomes_a_plain_model\[gpt2",
    # Several ranks: those of the cheapest model stay, and one fault of each kind.
    r"test_several_devices\.py::test_updates_by_hand_and_several_shapes",
    r"test_offload\.py::test_ranks_have_their_shares_on_a_drive\[4",
    r"/test_mesh\.py::test_a_rank_that_fails",
    r"test_chosen_mesh\.py::test_a_mesh_that_is_given",
    r"/test_mesh\.py::test_replicas_are_bitwise_micro_batches\[(?!2-2-1)",
    r"test_several_devices\.py::test_more_ranks_and_models_are_bitwise_one_process\[(2|4|3-(?!dropout))",
    r"test_several_devices\.py::test_(a_tied_table|losses_outside|a_checkpoint_goes_on)",
    r"test_ranks_schedules\.py::test_plans_and_delays_change_no_bit\[2",
    r"test_ranks_faults\.py::test_a_rank_that_fails_is_named_by_the_others\[killed-all_(to_all|numbers)",
    r"test_ranks_faults\.py::test_a_rank_that_fails_is_named_by_the_others\[(raises|stalls)",
    r"test_trainer_ranks\.py::test_(clipped|replicas|ranks_whose|ranks_train_and|a_full_disk|a_signal|a_rank_that_fails)",
    r"test_train_command\.py::test_two_ranks",
    r"test_torchrun\.py",
    r"test_ranks_saving\.py::test_(a_rank_that_dies\w+\[True|any_number)",
    # State on drives and on the device.
    r"test_offload\.py::test_offloads_leave_for_storage_where_ram_is_too_small_for_them\[5MB",
    r"test_offload\.py::test_offloads_to_storage_change_no_bit\[[12]",
    r"test_background_save\.py::test_updates_go_on_over_copies_while_nothing\w+\[(int[48]|resident, clipped)",
    r"test_background_save\.py::test_a_full_disk_is_told_by_the_next_call\[(synchronize|close|save)",
    r"test_background_save\.py::test_the_end_of_the_process\[killed",
    r"test_adam\.py::test_processes_race_to_build",
    r"test_residency\.py::test_a_model_that_fits_runs_without_transfers_and_bitwise_the_same\[gpt2-options2",
    r"test_residency\.py::test_state_on_the_device_is_worth_more_than_activations\[True",
    r"test_checkpoint\.py::test_killed_at_any_moment_the_last_checkpoint_is_found\[6",
    r"test_checkpoint\.py::test_a_scheduler_whose_state_is_saved_beside_goes_on_as_well\[(?!lambda)",
    r"test_tiers\.py::test_the_search_gives_up_host_bytes_for_less_on_the_drive\[0\.9-0\.93-mode1",
    # The command line; it plans by the code that compile plans by.
    r"test_plan_agrees\.py",
    r"test_cli\.py::test_the_estimate_of_the_largest_batch_is_about_right",
    r"test_cli\.py::test_plan_counts_the_tower\w+\[qwen3",
    r"test_cli\.py::test_what_the_host_has_no_room_for_goes_to_a_drive\[several1",
    # What no graph can hold, and defaults of the process: the hardest of each stays.
    r"test_calls\.py::test_what_no_graph_can_hold_is_refused_by_name\[(scan|cond)",
    r"test_calls\.py::test_the_default_dtype_is_not_that_of_the_state\[auto-",
    # The suite itself: each signal once, with workers or without.
    r"test_processes\.py::test_an_interrupted_suite_leaves_nothing_behind\[(2-2|15-0)",
    # Benchmarks: one dry part of the GPU's suite.
    r"test_kernel_curve\.py::test_loss_with_kernels_is_within_noise",
    # The simulated device: a few operators stay.
    r"simulated/test_out_of_memory\.py::test_at_each_operator",
    # Kernels in triton's interpreter: one shape for each kernel and dtype.
    r"interpreted/test_(glu|clamped_glu|layer_norm|rms_norm|rope|cross_entropy)\.py::\w+\[shape[02]-\S*dtype",
    r"interpreted/test_qk_norm_rope\.py::test_forward_and_backward\[(shape[023]|.*dtype[12]-gemma|.*dtype0-qwen)",
    r"interpreted/test_qk_norm_rope\.py::test_gradcheck\[6",
    # Other optimizers: one stays for moments, for whole tensors, and for settings that a step writes.
    r"test_any_optimizer\.py::test_trains_bitwise_as_a_plain_loop_and_resumes\[(?!SGD\]|Adafactor\]|sched|Adagrad)",
    r"test_any_optimizer\.py::test_a_host_budget_is_kept\w+\[Adafactor",
    r"test_trainer\.py::test_optimizers_are_named_as_upstream_names_them\[(?!adafactor|schedule)",
    r"interpreted/test_gated_delta_rule\.py::test_forward_and_backward\[shape([1-5]|0-dtype0)",
    r"interpreted/test_gated_delta_rule\.py::test_the_formulas_in_float64\[True",
    r"interpreted/test_gated_delta_rule\.py::test_planted_faults_are_found\[(?!one block)",
    r"interpreted/test_mamba2_chunk_scan\.py::test_forward_and_backward\[shape([013-6]|2-dtype0)",
    r"interpreted/test_mamba2_chunk_scan\.py::test_planted_faults_are_found\[(?!no decay)",
    r"interpreted/test_cross_entropy\.py::test_linear\[(dtype\d-plain|dtype0-all-F|dtype[12]-all-T)",
    r"interpreted/test_cross_entropy\.py::test_logits\[shape1-dtype[12]-(plain|softcap|smoothing)",
    r"interpreted/test_clamped_glu\.py::test_forward_and_backward\[shape3-halves-dtype[01]",
    r"interpreted/test_clamped_glu\.py::test_extreme_values\[dtype[01]-halves",
    r"interpreted/test_glu\.py::test_forward_and_backward\[shape1-dtype\d-(gelu_erf|relu)",
    r"interpreted/test_attention\.py::test_rules\[.*-True",
    r"interpreted/test_attention\.py::test_rules\[(?!causal-).*dtype1",  # float16
    r"interpreted/test_attention\.py::test_rules\[(?!all-).*dtype2",  # bfloat16
    r"interpreted/test_attention\.py::test_packed_documents\[(False|True-dtype1)",
    r"interpreted/test_attention\.py::test_the_compilers_operator_takes_this_kernel\[dtype1-features[0-2]",
    r"interpreted/test_rope\.py::test_forward_and_backward\[.*dtype([01]-True|2-False)",
    r"interpreted/test_attention\.py::test_tiles_of_other_chips\[.*-90",
    r"interpreted/test_cross_entropy\.py::test_logits_gradcheck\[(plain|softcap|smoothing)",
    r"interpreted/test_clamped_glu\.py::test_(strided|gradcheck)\[halves",
    r"interpreted/test_attention\.py::test_shapes\[shapes[034]",
    r"interpreted/test_uniform\.py::test_triton_and_torch_draw_the_same_numbers\[-42",
    r"interpreted/test_dropout\.py::test_triton_and_torch_drop_the_same_elements\[0\.[15]--42",
)


def mark_slow(items: Sequence[pytest.Item]) -> set[str]:
    """Mark them; returns the lines that found none, but for those of processes of their own."""
    unused = set(SLOW)
    for item in items:
        for pattern in SLOW:
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.slow)
                unused.discard(pattern)
    return {pattern for pattern in unused if not pattern.startswith(("interpreted/", "simulated/"))}
