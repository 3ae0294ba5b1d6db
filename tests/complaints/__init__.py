"""What users of other systems complain of, what harnesses were seen to do, and the tests that hold it."""

from __future__ import annotations

from typing import NamedTuple


class Complaint(NamedTuple):
    source: str
    symptom: str
    tests: tuple[str, ...]


HANDOVER, ROUTER = "proxy/test_handover.py::", "proxy/test_router.py::"
PROXY, CONVERSATIONS = "proxy/test_actor.py::", "proxy/test_conversations.py::"
MALFORMED, MATCHING = "proxy/test_malformed_calls.py::", "proxy/test_matching.py::"
CODEC, CHAT = "proxy/test_codec.py::", "proxy/test_api_chat.py::"
MESSAGES, RESPONSES = "proxy/test_api_messages.py::", "proxy/test_api_responses.py::"
ANTHROPIC, CLIENTS = "proxy/test_anthropic_client.py::", "proxy/test_clients.py::"
ENGINE, NUMBERS = "cell/engine/test_contract.py::", "cell/engine/test_contract_numbers.py::"
BOOK, PACK, LEDGER = "trajectory/test_book.py::", "trajectory/test_pack.py::", "trajectory/test_ledger.py::"
ROLES, TREE = "trajectory/test_roles.py::", "trajectory/test_tree.py::"
TRAJECTORY = "trajectory/test_actor.py::"
HARNESS, TRAINER, GSPO = "harness/test_actor.py::", "cell/train/test_trainer.py::", "loss/test_gspo.py::"

COMPLAINTS = (
    Complaint(
        "slime PR 2340",
        "an abort reached nobody: an orphan decoded beside its retry",
        (
            "proxy/test_migration.py::test_a_call_that_went_on_elsewhere_runs_nowhere_else",
            "proxy/test_conservation.py::"
            "test_every_token_of_every_engine_is_recorded_or_listed_as_undelivered",
        ),
    ),
    Complaint(
        "slime#1148",
        "calls before engines were ready met storms of 503",
        (f"{HANDOVER}test_a_call_waits_for_a_cell",),
    ),
    Complaint(
        "slime#2168",
        "connections failed right after an update of weights",
        (
            f"{ENGINE}test_calls_answer_whatever_is_asked_of_the_engine_meanwhile",
            f"{ENGINE}test_update_under_a_call_labels_each_token_with_its_version",
            f"{HANDOVER}test_many_calls_survive_a_cell_that_comes_and_goes",
        ),
    ),
    Complaint(
        "slime#2176",
        "an abort waited for slow judges",
        (
            f"{HARNESS}test_a_slow_judge_does_not_outlast_the_time_there_is",
            f"{HARNESS}test_when_the_job_stops_nothing_is_left",
        ),
    ),
    Complaint(
        "NeMo-RL PR 3613",
        "affinity pinned retries to a dead worker",
        (
            f"{ROUTER}test_a_failed_engine_is_excluded_from_the_next_try",
            f"{HANDOVER}test_a_dead_engines_calls_go_on_elsewhere",
            f"{HANDOVER}test_kill_9_of_an_engines_process_is_not_noticed",
        ),
    ),
    Complaint(
        "miles PR 690",
        "an engine that was added again stayed dead, one container that hung blocked a step",
        (
            f"{ROUTER}test_a_dead_engine_comes_back_with_its_cells_next_life",
            f"{HARNESS}test_what_is_not_over_in_time_is_dropped",
        ),
    ),
    Complaint(
        "agent-lightning#218, #355",
        "an unknown or late result killed the trainer, or was counted twice",
        (
            f"{BOOK}test_a_complete_group_takes_no_further_execution",
            f"{BOOK}test_an_end_is_counted_once_however_often_it_is_said",
            f"{TRAJECTORY}test_a_call_that_does_not_fit_is_refused_with_its_ids",
        ),
    ),
    Complaint(
        "SkyRL#1613, tinker-cookbook PR 497",
        "the first exception of a rollout ended the step",
        (
            f"{HARNESS}test_a_fault_in_one_execution_harms_no_other",
            "run/test_bad_input.py::test_the_job_goes_on",
        ),
    ),
    Complaint(
        "miles#2800",
        "one abort of the infrastructure discarded the group",
        (f"{HARNESS}test_what_was_dropped_is_played_anew", f"{HARNESS}test_refills_are_bounded"),
    ),
    Complaint(
        "UniRL PR 214",
        "a failure of the infrastructure became an empty answer with a reward",
        (
            f"{HARNESS}test_a_failed_evaluation_is_not_a_zero",
            f"{BOOK}test_a_dropped_execution_completes_its_group_but_is_not_in_it",
            f"{LEDGER}test_what_was_in_flight_when_an_execution_ended_is_listed_as_unfinished",
        ),
    ),
    Complaint(
        "hud-python PR 426",
        "a time-out skipped grading: the reward of progress was 0",
        (f"{HARNESS}test_however_a_harness_ends_what_it_left_is_scored",),
    ),
    Complaint(
        "agentcore-rl-toolkit PR 122",
        "a failed rollout became a row with one trained token",
        (
            f"{PACK}test_a_placeholder_counts_in_statistics_and_executions_but_brings_no_tokens",
            f"{TREE}test_a_call_that_nobody_was_answered_is_no_node_and_its_tokens_are_known",
        ),
    ),
    Complaint(
        "prime-rl PR 2960, PR 3313",
        "stale rollouts were dropped with their whole group",
        (
            f"{PACK}test_stale_calls_are_context",
            f"{PACK}test_an_execution_that_is_stale_altogether_has_no_trajectory_and_counts",
        ),
    ),
    Complaint(
        "ROLL#215",
        "a run stalled and nothing said why",
        (
            "run/test_looking.py::test_actors_say_what_they_are_at",
            f"{HANDOVER}test_no_cell_in_time_is_a_503_with_retry_after",
        ),
    ),
    Complaint(
        "stitch PR 146",
        "a time-out of one session ended the producer",
        (
            f"{HARNESS}test_a_workspace_that_cannot_be_made_is_a_placeholder",
            f"{HARNESS}test_a_fault_in_one_execution_harms_no_other",
        ),
    ),
    Complaint(
        "prime-rl#1334, ART#726, verl#3477, slime#2288",
        "a template that drops past thoughts broke prefixes: false forks",
        (f"{CONVERSATIONS}test_a_template_that_drops_what_was_thought_forks_nothing",),
    ),
    Complaint(
        "trl#5224, trl PR 6250, rllm PR 272",
        "what was sampled was decoded and encoded again, and cost ever more",
        (
            f"{CONVERSATIONS}test_a_conversation_with_tools_is_one_path",
            f"{CODEC}test_a_continuation_is_only_what_is_new",
            "proxy/test_prompts.py::test_whatever_is_long_in_a_message_is_encoded_off_the_loop",
        ),
    ),
    Complaint(
        "verl#3960, verl PR 1475",
        "tool calls were lost or escaped again with each turn",
        (
            f"{CODEC}test_arguments_are_not_escaped_again_with_each_turn",
            f"{MATCHING}test_any_arguments_are_recognised_after_a_round_trip",
        ),
    ),
    Complaint(
        "NeMo-RL#212, prime-rl#583, #2358, SkyRL PR 1296, open-instruct#1137, Megatron-LM#4590",
        "the loss was normalised by micro-batch or rank",
        (
            f"{TRAINER}test_the_gradient_does_not_depend_on_the_cut",
            f"{TRAINER}test_the_gradient_and_the_sums_do_not_depend_on_the_batches",
            f"{GSPO}test_an_execution_that_branches_more_weighs_no_more",
        ),
    ),
    Complaint(
        "prime-rl PR 600",
        "groups were formed by the order of prompts",
        ("harness/test_numbering.py::test_a_group_has_one_task_and_says_what_it_is",),
    ),
    Complaint(
        "Soup#723",
        "masked tokens changed the loss",
        (
            f"{GSPO}test_masked_tokens_touch_neither_value_nor_gradient",
            f"{TRAINER}test_masked_tokens_touch_neither_loss_nor_gradient",
        ),
    ),
    Complaint(
        "UniRL PR 409",
        "denominators counted sequences that were masked altogether",
        (
            f"{GSPO}test_a_trajectory_without_trainable_tokens_counts_nothing",
            f"{TRAINER}test_a_trajectory_that_is_all_masked_counts_nothing",
        ),
    ),
    Complaint(
        "slime PR 1418",
        "the mask of several turns was on the wrong ones",
        (
            f"{TREE}test_every_call_lies_on_a_path_and_is_sampled_where_its_output_is",
            f"{PACK}test_a_trajectory_holds_what_was_recorded",
        ),
    ),
    Complaint(
        "agentcore-rl-toolkit PR 104, SkyRL#406, tinker-cookbook PR 506, verl PR 1627",
        "limits of a turn, of an answer and of the window were mixed up, prompts cut",
        (
            f"{PROXY}test_limits_are_the_jobs_and_the_windows",
            f"{ENGINE}test_output_ends_with_the_window",
            f"{ENGINE}test_a_call_resumed_where_the_window_ends_ends_at_once",
        ),
    ),
    Complaint(
        "vime#64, slime#1695",
        "log-probabilities of engine and trainer drifted, or jumped after a resume",
        (
            f"{NUMBERS}test_logprobs_are_of_the_whole_distribution_at_the_temperature",
            f"{TRAINER}test_on_policy_nothing_is_clipped",
            "cell/train/test_optimizer.py::test_it_goes_on_from_its_state_as_if_never_stopped",
        ),
    ),
    Complaint(
        "agent-lightning#262, #44, vllm#27482",
        "streams had no token ids, or lost some",
        (
            f"{CONVERSATIONS}test_a_conversation_with_tools_is_one_path",
            "cell/engine/test_sglang_wire.py::test_pieces_of_a_call",
        ),
    ),
    Complaint(
        "litellm#13252",
        "count_tokens was a 404",
        (
            f"{ANTHROPIC}test_tokens_are_counted_without_a_call",
            f"{CLIENTS}test_openai_counts_what_a_call_will_have",
        ),
    ),
    Complaint(
        "spacebot#483, inspect_ai PR 3552",
        "a connection was cut while the model thought",
        (
            f"{PROXY}test_a_waiting_stream_is_kept_alive",
            f"{ANTHROPIC}test_a_stream_pings_while_it_waits",
        ),
    ),
    Complaint(
        "verifiers PR 1763, Gym#605, verl#6252, agentcore-rl-toolkit PR 97",
        "malformed tool calls killed rollouts, grew unseen, or no call was read and nothing said so",
        (
            f"{MALFORMED}test_a_broken_call_is_a_call_with_what_was_sampled_and_its_turn_goes_on",
            f"{MALFORMED}test_a_run_none_of_whose_tool_calls_is_read_raises_an_alarm_once",
            f"{TRAJECTORY}test_an_execution_none_of_whose_tool_calls_is_well_formed_is_told",
        ),
    ),
    Complaint(
        "sglang#25242, Qwen3.8#125",
        "parser and policy had other formats",
        (
            f"{MALFORMED}test_a_run_none_of_whose_tool_calls_is_read_raises_an_alarm_once",
            "proxy/test_tool_formats.py::test_which_format_a_text_is_in_is_known",
        ),
    ),
    Complaint(
        "vllm#30439, #23099, #25028",
        "Qwen3-Coder's values had wrong types, or ran into each other",
        (
            "proxy/test_tool_formats.py::test_values_are_what_the_schema_says",
            "proxy/test_tool_formats.py::test_a_missing_closing_tag_of_a_parameter_is_none_of_its_value",
        ),
    ),
    Complaint(
        "verl#4757, #6424",
        "a call that was only thought about was made",
        ("proxy/test_reasoning.py::test_a_call_that_is_only_thought_about_is_none",),
    ),
    Complaint(
        "prime-rl#2535",
        "the 400 of a prompt that is too long left the rollout and ended more than that",
        (
            f"{PROXY}test_limits_are_the_jobs_and_the_windows",
            f"{HANDOVER}test_what_every_engine_would_refuse_is_not_tried_again",
            "run/test_bad_input.py::test_each_execution_ends_as_it_should",
        ),
    ),
    Complaint(
        "AReaL's online_proxy.md, verifiers PR 2036, PR 2368",
        "a client's retry left an orphan or forked; a body's hash alone took new calls for retries",
        (
            f"{HANDOVER}test_a_repeated_request_gets_the_sample_that_was_under_way",
            f"{HANDOVER}test_a_repeated_request_gets_the_sample_that_was_recorded",
            f"{HANDOVER}test_alike_requests_of_waiting_clients_are_calls_of_their_own",
        ),
    ),
)

# As measured, of the versions that docs/harnesses.md names and of aider 0.86.2.
HARNESSES = (
    Complaint(
        "Claude Code",
        "a billing line in the system prompt changes from call to call",
        (
            f"{MESSAGES}test_the_billing_line_is_not_for_the_policy",
            f"{MATCHING}test_a_reformatted_prompt_is_recognised",
        ),
    ),
    Complaint(
        "Claude Code",
        "messages have the role system in mid-conversation",
        (
            f"{MESSAGES}test_system_prompts_come_as_text_or_blocks_and_in_mid_conversation",
            f"{CODEC}test_where_a_template_knows_one_system_message_the_user_says_later_ones",
        ),
    ),
    Complaint(
        "Claude Code",
        "cache marks move, blocks collapse to text",
        (f"{MESSAGES}test_marks_that_move_from_turn_to_turn_change_no_digest",),
    ),
    Complaint(
        "Claude Code",
        "thoughts come back, with an empty signature, or not at all",
        (
            f"{MATCHING}test_what_harnesses_do_with_thoughts_changes_nothing",
            f"{CONVERSATIONS}test_of_answers_that_read_alike_the_one_that_was_meant_goes_on",
        ),
    ),
    Complaint(
        "Claude Code, qwen-code",
        "an empty answer is asked for again, with or without words more",
        (
            f"{ROLES}test_an_empty_answer_to_a_prompt_that_is_asked_again_is_auxiliary",
            f"{ROLES}test_an_empty_answer_that_is_gone_on_from_is_main",
        ),
    ),
    Complaint(
        "Claude Code, qwen-code, opencode, codex",
        "broken arguments are wrapped, repaired, renamed or echoed",
        (
            f"{MALFORMED}test_whatever_a_harness_makes_of_a_broken_call_the_turn_goes_on",
            f"{MALFORMED}test_a_call_that_a_compaction_keeps_is_put_back_as_it_was_sampled",
        ),
    ),
    Complaint(
        "all",
        "a call of an unknown tool gets an error and the run goes on",
        (f"{MALFORMED}test_a_call_of_a_tool_that_is_not_there_is_the_harness_to_answer",),
    ),
    Complaint(
        "Claude Code, codex, opencode",
        "no header counts retries; others count them",
        (
            f"{HANDOVER}test_a_repeated_request_gets_the_sample_that_was_recorded",
            f"{HANDOVER}test_a_client_that_counts_its_retries_is_believed",
        ),
    ),
    Complaint(
        "Claude Code",
        "a stream that ends early is asked for again without a stream",
        (
            f"{ANTHROPIC}test_the_fallback_without_a_stream_gets_the_sample_that_the_stream_did_not_bring",
            f"{MATCHING}test_stream_alone_makes_no_other_request",
        ),
    ),
    Complaint(
        "Claude Code",
        "it compacts by itself where a 400 says that the prompt is too long, and by the usage it is told",
        (
            f"{PROXY}test_limits_are_the_jobs_and_the_windows",
            f"{CONVERSATIONS}test_a_conversation_with_tools_is_one_path",
        ),
    ),
    Complaint(
        "Claude Code, qwen-code",
        "a compaction keeps the newest turns behind the summary",
        (f"{MATCHING}test_an_answer_that_a_compaction_keeps_is_context_of_a_new_root",),
    ),
    Complaint(
        "Claude Code",
        "only what is between its tags goes on of a summary",
        (f"{ROLES}test_of_claude_codes_summary_only_what_its_tags_hold_reappears",),
    ),
    Complaint(
        "Claude Code",
        "sub-agents begin with the very same request",
        (
            f"{HANDOVER}test_another_agents_alike_request_is_no_repetition",
            f"{PROXY}test_draws_differ_between_executions_and_repetitions",
        ),
    ),
    Complaint(
        "Claude Code, opencode",
        "a title is asked for beside the work",
        (f"{ROLES}test_a_title_that_is_asked_for_beside_the_agent_is_auxiliary",),
    ),
    Complaint(
        "Claude Code, qwen-code",
        "history has answers that nobody sampled",
        (
            f"{MATCHING}test_a_foreign_answer_is_new_content",
            f"{CODEC}test_a_foreign_answer_is_rendered_as_context",
        ),
    ),
    Complaint(
        "qwen-code, opencode",
        "arguments and contents are written anew",
        (
            f"{MATCHING}test_a_reformatted_answer_is_recognised",
            f"{MATCHING}test_any_arguments_are_recognised_after_a_round_trip",
        ),
    ),
    Complaint(
        "qwen-code, codex, opencode",
        "a broken stream is an answer, or an error that ends the run",
        (
            f"{HANDOVER}test_a_role_change_changes_no_byte",
            f"{HANDOVER}test_no_cell_in_time_is_a_503_with_retry_after",
        ),
    ),
    Complaint(
        "codex",
        "tools stand in namespaces, some are the vendor's own",
        (f"{RESPONSES}test_namespaces_are_flattened_and_builtin_tools_dropped",),
    ),
    Complaint(
        "codex",
        "a retry has another order of metadata; item ids are sent back",
        (
            f"{RESPONSES}test_a_retry_with_other_metadata_in_another_order_is_the_same",
            f"{RESPONSES}test_ids_tell_answers_apart",
        ),
    ),
    Complaint(
        "codex, opencode",
        "it compacts for ever where usage stays high",
        ("proxy/test_compactions.py::*",),
    ),
    Complaint(
        "opencode",
        "a summary comes back as an answer of the assistant",
        (f"{ROLES}test_a_summary_may_reappear_as_an_assistant_message",),
    ),
    Complaint(
        "mini-swe-agent",
        "an answer without a tool call is dropped from history",
        (f"{MATCHING}test_a_dropped_answer_forks_at_its_parent",),
    ),
    Complaint(
        "aider",
        "temperature is asked for, tools are not",
        (
            f"{CHAT}test_unknown_fields_and_foreign_sampling_are_passed_over",
            f"{ROLES}test_an_agent_without_tools_is_main",
        ),
    ),
    Complaint(
        "all",
        "more tokens are asked for than the window has, ?beta=true and unknown fields are sent",
        (
            f"{PROXY}test_limits_are_the_jobs_and_the_windows",
            "proxy/test_bodies.py::test_what_harnesses_send_is_answered",
        ),
    ),
    Complaint(
        "all",
        "what ends a run is a 400: 429 and 5xx are tried again or end it wrongly",
        (f"{PROXY}test_a_closed_executions_key_is_dead",),
    ),
)
