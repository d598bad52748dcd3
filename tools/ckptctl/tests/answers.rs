//! Does the real binary exit with the promised status and print what scripts and people read? Against a fake node on
//! a real socket; no mount, no daemon.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails like the test")]

#[path = "../../../control/api/tests/fake/mod.rs"]
mod fake;

use fake::FakeNode;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tidemark_api::NodeApi;
use tidemark_api::server::Server;

/// A fake node that is served by a runtime of its own, so that the test may block on the binary.
struct Served {
    node: Arc<FakeNode>,
    state: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

fn served(node: FakeNode) -> Served {
    let state = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let node = Arc::new(node);
    let any_port = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
    let server = runtime.block_on(Server::bind(&state.path().join("ckptd.sock"), any_port)).unwrap();
    runtime.spawn(server.run(node.clone(), std::future::pending()));
    Served { node, state, _runtime: runtime }
}

fn command(state: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckptctl"));
    command.env("TIDEMARK_STATE_DIR", state).env_remove("CLICOLOR_FORCE").current_dir("/");
    command
}

fn ctl(state: &Path, words: &str) -> Output {
    command(state).args(words.split_whitespace()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_command_exits_with_the_promised_status() {
    let well = served(FakeNode::default());
    for (words, expected) in [
        ("", 0),
        ("status", 0),
        ("ls", 0),
        ("ls empty", 0),
        ("ls absent", 3),
        ("show run7/x", 0),
        ("show absent", 3),
        ("show absent@12", 3),
        ("why run7/x", 0),
        ("why absent", 3),
        ("why", 2),
        ("why /etc", 2),
        ("tiers", 0),
        ("nodes", 0),
        ("placement", 0),
        ("verify", 0),
        ("verify healed", 0),
        ("verify lost", 4),
        ("verify absent", 3),
        ("prefetch run7/x", 0),
        ("prefetch large", 1),
        ("prefetch --no-wait large", 0),
        ("prefetch absent", 3),
        ("prefetch", 2),
        ("flush", 0),
        ("flush --wait", 0),
        ("flush absent", 3),
        ("flush --wait absent", 3),
        ("flush --wait open", 1),
        ("flush open", 0),
        ("flush --wait --timeout 3 away", 5),
        ("commit run7/x", 0),
        ("commit absent", 3),
        ("commit fenced", 6),
        ("events", 0),
        ("doctor", 0),
        ("frobnicate", 2),
        ("flush --timeout 3", 2),
        ("ls /etc", 2),
        ("ls ../..", 2),
        ("show", 2),
        ("show @99999999999999999999", 2),
        ("-o yaml status", 2),
        ("bench mount --path /a --baseline /b --size 4GB", 2),
        ("bench mount --path /absent/a --baseline /absent/b --size 4K --no-wait", 1),
        ("status --exit-code", 0),
        ("--help", 0),
        ("--version", 0),
    ] {
        for format in ["table", "json"] {
            let output = ctl(well.state.path(), &format!("-o {format} {words}"));
            assert_eq!(code(&output), expected, "ckptctl {words}: {}", stderr(&output));
        }
    }
    let ill = served(FakeNode { degraded: true, ..FakeNode::default() });
    assert_eq!(code(&ctl(ill.state.path(), "doctor")), 1);
    assert_eq!(code(&ctl(ill.state.path(), "status")), 0, "the question was answered");
}

#[test]
fn status_speaks_of_trouble_only_when_there_is_some() {
    let well = stdout(&ctl(served(FakeNode::default()).state.path(), "status"));
    assert!(well.contains("state: SERVING") && well.ends_with("problems: none\n"), "{well}");
    assert!(!well.contains("status:") && !well.contains("action:"), "{well}");
    assert!(well.contains("step 1200") && well.contains("1 version, 10 B, 1m01s"), "{well}");
    let ill = stdout(&ctl(served(FakeNode { degraded: true, ..FakeNode::default() }).state.path(), ""));
    assert!(
        ill.contains("state: DEGRADED") && ill.contains("tier3_away") && ill.contains("action: nothing"),
        "{ill}"
    );
}

#[test]
fn json_has_numbers_and_nothing_else_is_on_stdout() {
    let node = served(FakeNode::default());
    let rows = json(&ctl(node.state.path(), "ls -o json"));
    assert_eq!(rows[0]["bytes"], 3_u64 << 29);
    assert_eq!(rows[0]["copies"]["object"]["files"], 2);
    assert_eq!(json(&ctl(node.state.path(), "ls empty -o json")), serde_json::json!([]));
    let show = json(&ctl(node.state.path(), "show run7/x --files -o json"));
    assert_eq!(show["files"][0]["path"], "run7/x/a");
    assert_eq!(json(&ctl(node.state.path(), "verify healed -o json"))["repaired"][0]["copy"], "host");
    let numbers: Vec<u64> = stdout(&ctl(node.state.path(), "events -o json --since 1"))
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["number"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [2, 3]);
}

#[test]
fn only_what_was_verified_is_ok_and_only_what_is_done_is_not_left() {
    let node = served(FakeNode::default());
    let last_line = |words: &str| {
        let text = stdout(&ctl(node.state.path(), words));
        text.lines().last().unwrap_or_default().to_owned()
    };
    for (words, begins) in [
        ("verify", "ok: "),
        ("verify open", "NOT ALL: "),
        ("verify empty", "nothing to verify: "),
        ("verify lost", "BAD: "),
        ("flush", "nothing is left to do: "),
        ("flush open", "1 not committed yet; "),
        ("flush --wait open", "1 not committed: "),
    ] {
        assert!(last_line(words).starts_with(begins), "ckptctl {words}: {}", last_line(words));
    }
}

#[test]
fn tables_are_plain_where_no_terminal_reads_them() {
    let node = served(FakeNode { degraded: true, ..FakeNode::default() });
    for words in [
        "status",
        "ls",
        "show run7/x --files",
        "why run7/x",
        "tiers",
        "nodes",
        "placement",
        "doctor",
        "events",
        "verify",
        "flush --wait",
    ] {
        let output = ctl(node.state.path(), words);
        assert!(!output.stdout.contains(&0x1b), "{words}: {}", stdout(&output));
        assert_eq!(stderr(&output), "", "{words}");
    }
    let ls = stdout(&ctl(node.state.path(), "ls"));
    assert!(ls.contains("1.5 GiB") && ls.contains("committed") && ls.contains("all"), "{ls}");
}

#[test]
fn what_a_loss_costs_and_what_lacks_a_copy_is_said_with_its_reason() {
    let (well, ill) =
        (served(FakeNode::default()), served(FakeNode { degraded: true, ..FakeNode::default() }));
    let placement = stdout(&ctl(well.state.path(), "placement"));
    assert!(placement.contains("2 nodes") && placement.contains("0.0 %"), "{placement}");
    assert!(placement.contains("n0, n1") && placement.contains("3 more of the kind"), "{placement}");
    let parsed = json(&ctl(well.state.path(), "placement -o json"));
    assert_eq!((&parsed["survival"][0]["fatal"], &parsed["nodes"][1]["partner"]), (&1.into(), &"n0".into()));
    let status = stdout(&ctl(well.state.path(), "status"));
    assert!(status.contains("copies: at n1, 2 files (3.0 GiB) lacking for"), "{status}");
    assert!(status.contains("on their way"), "{status}");
    let status = stdout(&ctl(ill.state.path(), "status"));
    assert!(status.contains("copies: nowhere") && status.contains("node n1 is gone"), "{status}");
    let nodes = stdout(&ctl(ill.state.path(), "nodes"));
    assert!(nodes.contains("cut_off") && nodes.contains("rack=r1"), "{nodes}");
    assert!(nodes.contains("node n0 is cut off from the coordinator  ("), "{nodes}");
}

#[test]
fn a_path_that_is_not_utf8_is_taken_and_shown() {
    let node = served(FakeNode::default());
    let path = std::ffi::OsStr::from_bytes(b"/ckpt/run7/\xff");
    let output = command(node.state.path()).arg("-ojson").arg("commit").arg(path).output().unwrap();
    assert_eq!(json(&output)["checkpoint"]["path"], "run7/%FF");
}

#[test]
fn without_a_daemon_the_last_known_status_is_shown_and_the_exit_says_so() {
    let state = tempfile::tempdir().unwrap();
    let output = ctl(state.path(), "status");
    assert_eq!(code(&output), 5);
    assert!(stderr(&output).contains("ckptd up"), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");

    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let status = runtime.block_on(FakeNode::default().status()).unwrap();
    std::fs::write(state.path().join("status.json"), serde_json::to_vec(&status).unwrap()).unwrap();
    let output = ctl(state.path(), "-o json");
    assert_eq!(code(&output), 5);
    assert_eq!(json(&output)["node"], "n0");
    assert!(stderr(&output).contains("last known"), "{}", stderr(&output));

    std::fs::write(state.path().join("status.json"), b"{").unwrap();
    let output = ctl(state.path(), "status");
    assert_eq!((code(&output), stdout(&output).as_str()), (5, ""));
    assert_eq!(code(&ctl(state.path(), "ls")), 5, "other commands have nothing to show");
}

#[test]
fn a_script_is_told_of_problems_when_it_asks() {
    let node = served(FakeNode { degraded: true, ..FakeNode::default() });
    assert_eq!(code(&ctl(node.state.path(), "status")), 0);
    assert_eq!(code(&ctl(node.state.path(), "status --exit-code")), 5, "tier3_away");
}

#[test]
fn what_was_in_memory_only_is_gone_when_nobody_keeps_it() {
    let node = served(FakeNode { degraded: true, ..FakeNode::default() });
    let state = tempfile::tempdir().unwrap();
    let last_known = ctl(node.state.path(), "status -o json").stdout;
    std::fs::write(state.path().join("status.json"), last_known).unwrap();
    let lock = std::fs::File::create(state.path().join("lock")).unwrap();
    let asked = || {
        let output = ctl(state.path(), "status -o json");
        assert_eq!(code(&output), 5, "{}", stderr(&output));
        let status = json(&output);
        let codes = status["problems"].as_array().unwrap().iter().map(|problem| problem["code"].clone());
        (codes.collect::<Vec<_>>(), status["runs"][0]["recoverable"].clone())
    };
    lock.lock().unwrap();
    let (codes, recoverable) = asked();
    assert_eq!(codes, ["tier3_away"], "what was wrong is known still");
    assert!(recoverable.is_object(), "a keeper has the memory");
    lock.unlock().unwrap();
    let (codes, recoverable) = asked();
    assert_eq!(
        (codes, recoverable),
        (vec!["tier3_away".into(), "unclean_end".into()], serde_json::Value::Null)
    );
}

#[test]
fn certificates_and_what_is_no_mount_are_said_as_asked() {
    let node = served(FakeNode::default());
    let made = tempfile::tempdir().unwrap();
    let directory = made.path().join("authority");
    let output = ctl(node.state.path(), &format!("certs init {} -o json", directory.display()));
    assert_eq!((code(&output), &json(&output)["kind"]), (0, &"authority".into()), "{}", stderr(&output));
    let output = ctl(node.state.path(), &format!("certs node {} n1 -o json", directory.display()));
    assert!(json(&output)["certificate"].as_str().unwrap().ends_with("n1.pem"), "{}", stdout(&output));
}

#[test]
fn doctor_says_of_a_daemon_that_does_not_answer_that_something_is_wrong() {
    let state = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(state.path().join("ckptd.sock")).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let output = ctl(state.path(), "doctor -o json");
    hangs_up.join().unwrap();
    assert_eq!(code(&output), 1, "{}", stderr(&output));
    let checks = json(&output)["checks"].clone();
    let failed = |check: &serde_json::Value| check["name"] == "no_answer" && check["verdict"] == "fail";
    assert!(checks.as_array().unwrap().iter().any(failed), "{checks:#}");
}

#[test]
fn an_interrupted_verify_ends_the_work() {
    let node = served(FakeNode::default());
    let mut child =
        command(node.state.path()).args(["verify", "endless"]).stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let wait_for = |what: &str, flag: &std::sync::atomic::AtomicBool| {
        while !flag.load(Ordering::SeqCst) {
            assert!(Instant::now() < deadline, "{what} did not happen in 10 s");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for("the verify", &node.node.verify_started);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the end of the verify", &node.node.verify_dropped);
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let node = served(FakeNode::default());
    // Gone before it begins: the node has three events, and no fourth by which a later end would be noticed.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child =
        command(node.state.path()).args(["events", "-f"]).stdout(writer).stderr(Stdio::piped()).spawn();
    let output = child.unwrap().wait_with_output().unwrap();
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
}
