//! The pace of copies. Does not own: the rule itself (`protocol::replication`), notices of complete checkpoints (the cluster suite).

use super::*;
use tokio::time::Instant;

/// Lowest rate.
const LEAST: u64 = 128 << 20;
const INTERVAL: Duration = Duration::from_millis(100);

/// Completes a second checkpoint, and checks its pace: at least the rate that `bytes` need in half of the time between the two.
async fn assert_paced(running: &Running, began: Instant, bytes: u64) {
    running.replicator.checkpoint_completed();
    until("a pace is in force", || running.replicator.pace_bytes_per_s().is_some()).await;
    let longest_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
    let least = (bytes * 1000 / (longest_ms / 2 + 1)).max(LEAST);
    let pace = running.replicator.pace_bytes_per_s().unwrap();
    assert!(pace >= least, "{pace} bytes a second, and {bytes} bytes within {longest_ms} ms need {least}");
    // The loop may have heard of the first checkpoint late, but not by half of the time.
    let most = bytes * 1000 / (u64::try_from(INTERVAL.as_millis()).unwrap() / 4);
    assert!(bytes == 0 || pace <= most, "{pace} bytes a second, and {most} are the most");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_complete_checkpoint_sets_the_pace_and_a_lift_frees_it() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    // No node is there to take copies.
    let nobody = Address { node: "z".to_owned(), address: "z".to_owned() };
    let running = home.replicator(vec![nobody]);
    let bytes = noise(3 * CHUNK, 20);
    let open = home.create("step1.pt");
    running.replicator.look_at_node(open.node, Priority::Base);
    until("it is known", || running.replicator.board_is_read()).await;
    write_all(&open.backing, &bytes).unwrap();
    home.close(&open);
    // The loop is not notified of the seal: the caller that reports the checkpoint complete may know it first.
    let (file, seal) = home.seal(open.node);
    let began = Instant::now();
    running.replicator.checkpoint_completed();
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(running.replicator.pace_bytes_per_s(), None, "no interval is known");
    assert_paced(&running, began, 3 * CHUNK_BYTES).await;
    let pace = running.replicator.pace_bytes_per_s();
    assert_eq!(u64::try_from(home.metrics.replica_pace_bytes.get()).ok(), pace);
    running.replicator.lift_pace();
    until("somebody waits", || running.replicator.pace_bytes_per_s().is_none()).await;
    assert_eq!(home.metrics.replica_pace_bytes.get(), 0);
    // If both come before the loop reads them, the last one counts.
    running.replicator.lift_pace();
    running.replicator.checkpoint_completed();
    until("a pace is in force", || running.replicator.pace_bytes_per_s().is_some()).await;
    running.replicator.checkpoint_completed();
    running.replicator.lift_pace();
    until("somebody waits", || running.replicator.pace_bytes_per_s().is_none()).await;

    // A new partner and a new copy do not lift the pace; a partner that has lost its memory does.
    running.replicator.checkpoint_completed();
    until("a pace is in force", || running.replicator.pace_bytes_per_s().is_some()).await;
    running.partners.send_replace(vec![partner.address()]);
    running.acknowledged(file, seal, 1).await;
    assert!(running.replicator.pace_bytes_per_s().is_some(), "it never had a copy");
    running.replicator.saw_life("b", Incarnation(4711));
    until("a copy was lost", || running.replicator.pace_bytes_per_s().is_none()).await;
    running.acknowledged(file, seal, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partner_that_another_takes_the_place_of_lifts_the_pace() {
    let network = Network::new();
    let nodes = ["a", "b", "c"].map(|name| Node::new(&network, name, 64 << 20));
    let running = nodes[0].replicator(vec![nodes[1].address()]);
    let (node, file, seal) = nodes[0].save("step1.pt", &noise(CHUNK + 1, 21));
    running.replicator.look_at_node(node, Priority::Base);
    running.acknowledged(file, seal, 1).await;
    for _ in 0..2 {
        running.replicator.checkpoint_completed();
        tokio::time::sleep(INTERVAL).await;
    }
    assert!(running.replicator.pace_bytes_per_s().is_some());
    running.partners.send_replace(vec![nodes[2].address()]);
    until("it has one copy less than it should", || running.replicator.pace_bytes_per_s().is_none()).await;
    running.acknowledged(file, seal, 2).await;
}

/// The node has no partner for a minute between a lost one and the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_had_a_copy_is_made_again_when_a_partner_comes_after_a_time_without_one() {
    let network = Network::new();
    let nodes = ["a", "b", "c"].map(|name| Node::new(&network, name, 64 << 20));
    let running = nodes[0].replicator(Vec::new());
    let paced = async || {
        running.replicator.checkpoint_completed();
        tokio::time::sleep(INTERVAL).await;
        running.replicator.checkpoint_completed();
        until("a pace is in force", || running.replicator.pace_bytes_per_s().is_some()).await;
    };
    let (node, file, seal) = nodes[0].save("step1.pt", &noise(CHUNK + 1, 23));
    running.replicator.look_at_node(node, Priority::Base);
    until("it is known", || running.replicator.board_is_read()).await;
    paced().await;
    running.partners.send_replace(vec![nodes[1].address()]);
    running.acknowledged(file, seal, 1).await;
    assert!(running.replicator.pace_bytes_per_s().is_some(), "it never had a copy");

    running.partners.send_replace(Vec::new());
    tokio::time::sleep(INTERVAL).await;
    running.partners.send_replace(vec![nodes[2].address()]);
    until("it has one copy less than it should", || running.replicator.pace_bytes_per_s().is_none()).await;
    running.acknowledged(file, seal, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_went_before_the_checkpoint_was_complete_counts_and_small_files_do() {
    let network = Network::new();
    let (home, partner) = (Node::new(&network, "a", 96 << 20), Node::new(&network, "b", 96 << 20));
    let running = home.replicator(vec![partner.address()]);
    let began = Instant::now();
    running.replicator.checkpoint_completed();
    until("it has heard it", || running.replicator.board_is_read()).await;
    let small = noise(256 << 10, 22);
    let mut saved = Vec::new();
    for at in 0..100 {
        let (node, file, seal) = home.save(&format!("rank{at}"), &small);
        running.replicator.look_at_node(node, Priority::Base);
        saved.push((file, seal));
    }
    for (file, seal) in saved {
        running.acknowledged(file, seal, 1).await;
    }
    tokio::time::sleep(INTERVAL).await;
    assert_paced(&running, began, 100 * (256 << 10)).await;
}
