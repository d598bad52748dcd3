//! Small states: saves of each kind are loaded from memory and, after a restart with empty memory, from Tier-3.

use tidemark_tests::python::{Hashes, Python, hashes};

use crate::{below, daemon, environment, restart_empty, script};

#[test]
fn a_torch_file_loads_with_and_without_mmap() {
    let Some(python) = environment() else { return };
    let mut daemon = daemon("1GiB");
    std::fs::create_dir_all(daemon.mount().join("torch")).unwrap();
    let path = below(&daemon, "torch/step-7.pt");
    let saved = hashes(&python.run(&script("torch_file.py"), &["save", &path, "7"]), "saved");
    let check = |python: &Python| {
        let printed = python.run(&script("torch_file.py"), &["load", &path]);
        for way in ["read", "mapped", "reread"] {
            assert_eq!(hashes(&printed, way), saved, "{way}");
        }
    };
    check(&python);
    restart_empty(&mut daemon);
    check(&python);
}

#[test]
fn a_torch_file_saved_over_itself_is_the_newer_one() {
    let Some(python) = environment() else { return };
    let mut daemon = daemon("1GiB");
    let path = below(&daemon, "last.pt");
    let save = |seed: &str| hashes(&python.run(&script("torch_file.py"), &["save", &path, seed]), "saved");
    let older = save("1");
    daemon.flush();
    let newer = save("2");
    assert_ne!(older, newer);
    restart_empty(&mut daemon);
    assert_eq!(hashes(&python.run(&script("torch_file.py"), &["load", &path]), "read"), newer);
}

#[test]
fn a_distributed_checkpoint_of_two_ranks_loads() {
    distributed("save");
}

#[test]
fn an_asynchronous_distributed_checkpoint_holds_what_was_there_when_it_began() {
    distributed("async-save");
}

fn distributed(command: &str) {
    let Some(python) = environment() else { return };
    let mut daemon = daemon("1GiB");
    let path = below(&daemon, "dcp/step-20");
    let per_rank = |arguments: &[&str], label: &str| -> Vec<Hashes> {
        python
            .run_ranks(2, &script("dcp.py"), arguments)
            .iter()
            .map(|printed| hashes(printed, label))
            .collect()
    };
    let saved = per_rank(&[command, &path, "20"], "saved");
    assert_ne!(saved[0], saved[1], "the ranks hold different parts");
    assert_eq!(per_rank(&["load", &path], "loaded"), saved);
    restart_empty(&mut daemon);
    let checkpoint = daemon.checkpoint("dcp/step-20").expect("it is listed");
    assert_eq!(checkpoint["state"], "committed");
    assert_eq!(checkpoint["step"], 20);
    assert_eq!(per_rank(&["load", &path], "loaded"), saved);
}

#[test]
fn safetensors_load_from_one_file_and_from_shards_with_an_index() {
    let Some(python) = environment() else { return };
    let mut daemon = daemon("1GiB");
    let path = below(&daemon, "hf/checkpoint-3");
    let saved = hashes(&python.run(&script("safetensors_files.py"), &["save", &path, "3"]), "saved");
    let check = |python: &Python| {
        let printed = python.run(&script("safetensors_files.py"), &["load", &path]);
        assert_eq!(hashes(&printed, "single"), saved);
        assert_eq!(hashes(&printed, "sharded"), saved);
    };
    check(&python);
    restart_empty(&mut daemon);
    check(&python);
}
