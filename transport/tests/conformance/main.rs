//! The contract that every link keeps: the same tests over each of them.
//!
//! Owns: the list of links and of tests. The tests are in `words` and `bytes`, their nodes and files in `world`;
//! `faults` has the tests that only a faulty link needs.

mod bytes;
mod faults;
mod words;
mod world;

use world::Kind;

macro_rules! every_link {
    ($($module:ident :: $test:ident),* $(,)?) => {
        every_link!(@ loopback Loopback: $($module::$test),*);
        every_link!(@ plain Plain: $($module::$test),*);
        every_link!(@ authenticated Authenticated: $($module::$test),*);
        every_link!(@ encrypted Encrypted: $($module::$test),*);
        every_link!(@ streams Streams: $($module::$test),*);
        every_link!(@ faulty Faulty: $($module::$test),*);
    };
    (@ $link:ident $kind:ident: $($module:ident :: $test:ident),*) => {
        mod $link {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    super::world::in_time(super::$module::$test(super::Kind::$kind)).await;
                }
            )*
        }
    };
}

every_link! {
    words::a_call_is_answered_by_whom_it_was_for,
    words::many_calls_at_once_get_their_own_answers,
    words::tells_come_in_the_order_they_were_said,
    words::a_call_comes_after_the_tells_before_it,
    words::a_deadline_ends_a_call_and_not_the_connection,
    words::a_refusal_carries_its_kind_and_reason,
    words::the_longest_bodies_pass_and_longer_ones_are_refused_here,
    words::an_answer_that_is_too_long_is_refused,
    words::nobody_at_the_address_is_unreachable,
    words::a_call_waits_for_a_node_that_starts_late,
    words::another_node_at_the_address_is_refused,
    words::another_cluster_is_refused,
    words::of_two_nodes_with_one_name_the_first_stays,
    words::a_restarted_daemon_takes_the_place_of_its_earlier_run,
    words::coming_and_leaving_are_told_once_each,
    words::epochs_are_told_both_ways,
    words::a_node_may_call_itself,
    words::a_closed_link_says_so,
    bytes::a_push_lands_byte_for_byte,
    bytes::a_pull_lands_byte_for_byte,
    bytes::sparse_ranges_leave_the_rest_alone,
    bytes::no_bytes_are_fine,
    bytes::every_landed_byte_was_told_before_the_push_returned,
    bytes::the_token_of_another_node_is_refused,
    bytes::a_revoked_token_is_refused,
    bytes::a_token_for_one_direction_is_refused_for_the_other,
    bytes::no_byte_goes_beyond_the_limit,
    bytes::a_refused_push_does_not_spoil_the_next,
    bytes::a_source_that_is_too_short_is_the_callers_fault,
    bytes::a_receiver_without_space_says_so,
    bytes::a_push_asks_its_pace_for_every_byte,
    bytes::words_do_not_wait_behind_bytes,
    bytes::two_pushes_into_one_file_at_once,
}
