"""What people complain of in actor runtimes, as tests named by the symptom. `INDEX` says where each is."""

INDEX: dict[int, list[str]] = {
    1: [
        "tests/actors/test_deadlock.py::test_a_cycle_of_asks_is_named_at_once",
        "tests/actors/test_links.py::test_cycles_over_nodes_are_named",
    ],
    2: ["tests/actors/complaints/test_errors.py::test_an_error_with_a_constructor_of_its_own_comes_through"],
    3: ["tests/actors/complaints/test_memory.py::test_a_producer_that_outruns_its_consumer_fills_no_memory"],
    4: ["tests/actors/complaints/test_memory.py::test_callers_that_come_and_go_leave_nothing_behind"],
    5: ["tests/actors/complaints/test_every_step.py::test_a_cancel_is_never_lost_whenever_it_comes"],
    6: [
        "tests/actors/complaints/test_errors.py::test_wait_for_which_swallows_a_cancel_is_banned",
        "tests/actors/complaints/test_errors.py::test_a_cancel_in_the_turn_of_the_answer_is_kept",
    ],
    7: ["tests/actors/complaints/test_restarts.py::test_calls_retried_while_an_async_actor_restarts_all_end"],
    8: [
        "tests/actors/complaints/test_every_step.py::test_a_reset_at_any_step_leaves_no_hole_and_doubles_nothing",
        "tests/actors/test_supervisor.py::test_a_ref_to_a_former_life_never_reaches_the_next",
    ],
    9: [
        "tests/actors/complaints/test_every_step.py::test_a_call_to_a_machine_that_lost_power_ends_in_the_window"
    ],
    10: ["tests/actors/complaints/test_restarts.py::test_an_unused_async_method_changes_nothing"],
    11: ["tests/actors/test_process.py::test_an_idle_process_sleeps"],
    12: ["tests/actors/complaints/test_restarts.py::test_a_named_actor_outlives_who_named_it"],
    13: [
        "tests/cell/test_actor.py::test_a_rank_that_dies_is_the_cells_end",
        "tests/cell/test_group.py::test_a_group_is_rebuilt_again_and_again",
    ],
    14: [
        "tests/actors/complaints/test_ends.py::test_one_interrupt_ends_everything_soon",
        "tests/actors/test_node.py::test_a_top_level_crash_that_nobody_handles_fails_the_node",
        "tests/run/test_stopping.py::test_the_first_interrupt_drains_to_a_checkpoint_at_once",
    ],
    15: [
        "tests/actors/complaints/test_errors.py::test_ten_thousand_undelivered_messages_are_few_lines",
        "tests/actors/complaints/test_errors.py::test_of_nested_calls_that_time_out_the_innermost_is_named",
    ],
    16: ["tests/actors/complaints/test_restarts.py::test_a_failure_passes_every_owner_up_to_the_root"],
    17: [
        "tests/actors/test_process.py::test_an_exit_code_and_the_last_lines_are_told",
        "tests/actors/test_process.py::test_a_killed_process_is_known_at_once_with_its_signal",
    ],
    18: ["tests/actors/complaints/test_memory.py::test_hundreds_of_actors_share_one_connection"],
    19: [
        "tests/actors/complaints/test_every_byte.py::test_a_connection_closed_at_any_byte_fails_what_waits_for_it"
    ],
    20: ["tests/actors/complaints/test_ends.py::test_a_remote_stream_dropped_after_the_end_is_silent"],
    21: [
        "tests/actors/complaints/test_ends.py::test_stopping_oneself_at_the_start_does_not_hang",
        "tests/actors/complaints/test_ends.py::test_stopped_now_answers_what_waits_with_an_error",
        "tests/actors/complaints/test_ends.py::test_a_drained_actor_answers_what_waits",
        "tests/actors/test_restarts.py::test_children_are_gone_when_their_killed_parent_is",
    ],
    22: [
        "tests/actors/complaints/test_ends.py::test_a_small_mailbox_full_before_the_start_is_over_blocks_nothing"
    ],
    23: [
        "tests/actors/test_links.py::test_a_peers_end_fails_everything_at_once",
        "tests/actors/conftest.py::pytest_asyncio_loop_factories",
    ],
    24: [
        "tests/actors/complaints/test_memory.py::test_peers_that_flood_each_other_and_read_no_answers_go_on",
        "tests/actors/test_actor.py::test_two_actors_that_flood_each_other_go_on",
    ],
}
