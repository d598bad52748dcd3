//! Members: which node is cut off or gone, which copies are recreated, and what people see of it on any node.
//!
//! Does not own: the network (`net`), one tree over the nodes (`tree`).

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::machine;
use tidemark_tests::net::{Network, Node};
use tidemark_tests::process;
use tidemark_transport::certs;

const LIMIT: Duration = Duration::from_secs(60);
const BYTES: usize = 5 << 20;
/// Time after which the metrics of calls are up to date. The daemon updates them five times a second.
const COUNTED: Duration = Duration::from_millis(600);
/// Limit until a lost node counts as gone: three beats of 150 ms, 200 ms of its neighbours, and reserve for a busy machine.
const GONE_MS: i64 = 1_500;

/// Nodes of one cluster, of which the first is the coordinator.
struct Members {
    nodes: Vec<Node>,
    _network: Network,
    folder: tempfile::TempDir,
}

impl Members {
    /// Starts a node for each rack, all with this configuration.
    fn start(racks: &[&str], config: &str) -> Option<Self> {
        if !machine::can_mount() {
            return None;
        }
        let names: Vec<String> = (1..=racks.len()).map(|at| format!("n{at}")).collect();
        let network = Network::make(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let folder = tempfile::tempdir().expect("a temporary directory");
        let (certificates, tier3) = (folder.path().join("certs"), folder.path().join("tier3"));
        certs::init(&certificates, "tidemark").expect("an authority");
        fs::create_dir(&tier3).expect("a directory");
        let mut nodes: Vec<Node> = Vec::new();
        for (name, rack) in names.iter().zip(racks) {
            let host = network.host(name).clone();
            certs::issue(&certificates, name, &[host.address().to_string()]).expect("a certificate");
            let mut flags = vec!["--certs".to_owned(), certificates.display().to_string()];
            flags.extend(["--label".to_owned(), format!("rack={rack}")]);
            if let Some(first) = nodes.first() {
                flags.extend(["--coordinator".to_owned(), format!("n1@{}", first.daemon().ready().listen)]);
            }
            let config = format!("[save]\nsettle_s = 0.5\n[tier3]\npaced = false\n{config}");
            let options = DaemonOptions {
                tier1: "256MiB".into(),
                config: Some(config),
                tier3: Some(format!("file://{}", tier3.display())),
                flags,
                ..DaemonOptions::default()
            };
            nodes.push(Node::start(&host, options));
        }
        let members = Self { nodes, _network: network, folder };
        let all = || {
            let rows = rows(members.daemon(0));
            let alive = rows.iter().filter(|row| row["standing"] == "alive").count();
            (alive == names.len()).then_some(())
        };
        process::until(LIMIT, all).expect("all join");
        Some(members)
    }

    fn daemon(&self, node: usize) -> &Daemon {
        self.nodes[node].daemon()
    }

    fn mount(&self, node: usize) -> &Path {
        self.daemon(node).mount()
    }

    /// Takes Tier-3 away, so that no node can write to it from now on.
    fn lose_tier3(&self) {
        let tier3 = self.folder.path().join("tier3");
        fs::rename(&tier3, self.folder.path().join("away")).expect("it is there");
        fs::write(&tier3, b"not a directory").expect("a file");
    }
}

/// Returns the rows of `ckptctl nodes`.
fn rows(daemon: &Daemon) -> Vec<Value> {
    daemon.ctl_json(&["nodes"]).as_array().expect("a list").clone()
}

fn row(daemon: &Daemon, name: &str) -> Value {
    rows(daemon).into_iter().find(|row| row["name"] == name).unwrap_or(Value::Null)
}

fn wait_for_standing(daemon: &Daemon, name: &str, standing: &str) -> Value {
    let found = process::until(LIMIT, || Some(row(daemon, name)).filter(|row| row["standing"] == standing));
    found.unwrap_or_else(|| panic!("{name} is not {standing}: {:#?}\n{}", rows(daemon), daemon.log_tail()))
}

/// Waits until a node's report about its copies is as wanted, and returns it.
fn wait_for_copies(daemon: &Daemon, wanted: impl Fn(&Value) -> bool) -> Value {
    let said = || Some(daemon.ctl_json(&["status"])).filter(|status| wanted(&status["replication"]));
    process::until(LIMIT, said)
        .unwrap_or_else(|| panic!("{:#}\n{}", daemon.ctl_json(&["status"])["replication"], daemon.log_tail()))
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    i64::try_from(since.as_millis()).expect("before the year 292 million")
}

fn calls(daemon: &Daemon, metric: &str, call: &str) -> f64 {
    daemon.metric(metric, &[&format!("call=\"{call}\"")])
}

/// Goal: a broken network between a node and the coordinator is not taken for the node's death while another node hears it.
#[test]
fn a_node_that_only_the_coordinator_does_not_hear_is_cut_off_and_not_gone() {
    let Some(members) = Members::start(&["r1", "r2", "r3"], "") else { return };
    let bytes = vec![7; BYTES];
    fs::write(members.mount(2).join("kept"), &bytes).unwrap();
    assert!(fs::read(members.mount(0).join("kept")).unwrap() == bytes, "the coordinator knows of it");
    let own = members.mount(2).join("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("early"), b"3").unwrap();
    // From now on no node has the directory alone: changes wait for a node that has one alone, even if it is cut off.
    fs::write(members.mount(1).join("other"), b"2").unwrap();
    let cut = members.nodes[0].host().partition(members.nodes[2].host());
    let found = wait_for_standing(members.daemon(0), "n3", "cut_off");
    assert!(found["why"].as_str().unwrap().contains("n2 hears it"), "{found:#}");
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let standing = row(members.daemon(0), "n3")["standing"].clone();
        assert!(standing == "cut_off" || standing == "alive", "{standing}: {}", members.daemon(0).log_tail());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(members.daemon(0).ctl_json(&["placement"])["nodes"].as_array().unwrap().len(), 3);
    assert!(fs::read(members.mount(1).join("kept")).unwrap() == bytes, "what it holds is there");
    // The node itself reports that no coordinator decides for it, and shows what it knows.
    let status = process::until(LIMIT, || {
        let status = members.daemon(2).ctl_json(&["status"]);
        status["problems"].to_string().contains("coordinator_away").then_some(status)
    });
    assert!(status.is_some(), "{}", members.daemon(2).log_tail());
    let refused = members.daemon(2).ctl(&["placement"]);
    assert_eq!(refused.status.code(), Some(5), "{}", shown(&refused));
    // The coordinator cannot know the file that the node makes meanwhile, and a command that relies on the full list says so.
    fs::write(own.join("late"), b"3").unwrap();
    let flushed = members.daemon(0).ctl(&["flush", "--wait", "--timeout", "5"]);
    assert_eq!(flushed.status.code(), Some(1), "{}", shown(&flushed));
    assert!(shown(&flushed).contains("node n3 (cut_off) was not heard"), "{}", shown(&flushed));
    let problems = members.daemon(0).ctl_json(&["status"])["problems"].to_string();
    assert!(problems.contains("node_away") && problems.contains("n3"), "{problems}");
    assert!(cut.heal() > 0);
    wait_for_standing(members.daemon(0), "n3", "alive");
    members.daemon(0).flush();
    assert_eq!(fs::read(members.mount(1).join("own/late")).unwrap(), b"3");
    fs::write(members.mount(2).join("again"), &bytes).unwrap();
    assert!(fs::read(members.mount(1).join("again")).unwrap() == bytes);
}

/// Goal: a loss is known in about a second and reported with its reason. When the node is gone for good, its copies are recreated.
#[test]
fn a_lost_node_is_gone_in_a_second_and_the_copies_that_it_kept_are_made_again_on_the_next_one() {
    let Some(mut members) = Members::start(&["r1", "r2", "r3", "r4"], "[members]\nfor_good_s = 3\n") else {
        return;
    };
    members.lose_tier3();
    let placed = members.daemon(0).ctl_json(&["placement"]);
    let partners = placed["nodes"].as_array().unwrap();
    // A node whose partner can be lost.
    let index = |name: &Value| members.nodes.iter().position(|node| *name == *node.host().name()).unwrap();
    let home = partners.iter().find(|row| row["node"] != "n1" && row["partner"] != "n1").unwrap();
    let (home, lost) = (index(&home["node"]), index(&home["partner"]));
    let lost_name = members.nodes[lost].host().name().to_owned();
    fs::write(members.mount(home).join("saved"), vec![3; BYTES]).unwrap();
    let daemon = members.daemon(home);
    let acknowledged = || daemon.metric("tidemark_replica_acknowledged_files_total", &[]);
    process::until(LIMIT, || (acknowledged() >= 1.0).then_some(())).expect("its partner has it");
    let before = wait_for_copies(daemon, |copies| copies["lacking_files"] == 0);
    assert_eq!(before["replication"]["partner"], *lost_name);
    assert_eq!(before["problems"].to_string().matches("under_replicated").count(), 0);

    let began_ms = now_ms();
    members.nodes[lost].power_off();
    let gone = wait_for_standing(members.daemon(0), &lost_name, "gone");
    let took_ms = gone["since_ms"].as_i64().unwrap() - began_ms;
    println!("cluster: {lost_name} was gone {took_ms} ms after its power went: {}", gone["why"]);
    assert!((0..GONE_MS).contains(&took_ms), "{took_ms} ms: {gone:#}");
    assert!(gone["why"].as_str().unwrap().contains("did not hear it"), "{gone:#}");
    let daemon = members.daemon(home);
    let status = wait_for_copies(daemon, |copies| copies["lacking_files"] == 1);
    let copies = &status["replication"];
    assert_eq!((&copies["partner"], &copies["lacking_bytes"]), (&Value::Null, &BYTES.into()));
    assert!(copies["why"].as_str().unwrap().contains(&format!("node {lost_name} is gone")), "{copies:#}");
    assert!(copies["since_ms"].as_i64().unwrap() >= began_ms, "{copies:#}");
    assert!(status["problems"].to_string().contains("under_replicated"), "{:#}", status["problems"]);

    let status =
        wait_for_copies(daemon, |copies| !copies["partner"].is_null() && copies["lacking_files"] == 0);
    let next = status["replication"]["partner"].as_str().unwrap();
    assert_ne!(next, lost_name);
    let taken = process::until(LIMIT, || {
        let acknowledged = daemon.metric("tidemark_replica_acknowledged_files_total", &[]);
        (acknowledged >= 2.0).then_some(())
    });
    assert!(taken.is_some(), "it was not copied again: {}", daemon.log_tail());
    let keeper = members.nodes.iter().find(|node| node.host().name() == next).unwrap();
    let received = keeper.daemon().metric("tidemark_replica_received_bytes_total", &[]);
    let spared = keeper.daemon().metric("tidemark_replica_spared_bytes_total", &[]);
    assert!(received + spared >= 5_000_000.0, "{next} received {received} and was spared {spared}");
    assert_eq!(row(members.daemon(0), &lost_name), Value::Null, "it is no member any more");
    let placed = members.daemon(0).ctl_json(&["placement"]);
    assert_eq!(placed["nodes"].as_array().unwrap().len(), 3, "{placed:#}");
}

/// Goal: any node answers what only the coordinator knows, or names the node that does.
#[test]
fn every_node_shows_what_the_coordinator_knows() {
    let Some(members) = Members::start(&["r1", "r1", "r2"], "") else { return };
    let (coordinator, member) = (members.daemon(0), members.daemon(1));
    let placed = member.ctl_json(&["placement"]);
    assert_eq!(placed, coordinator.ctl_json(&["placement"]));
    let survival = placed["survival"].as_array().unwrap();
    let row =
        |lost: u64, of: &str| survival.iter().find(|row| row["lost"] == lost && row["of"] == of).unwrap();
    assert_eq!((&row(1, "node")["combinations"], &row(1, "node")["fatal"]), (&3.into(), &0.into()));
    assert_eq!((&row(2, "node")["combinations"], &row(2, "node")["fatal"]), (&3.into(), &3.into()));
    assert_eq!(
        (&row(1, "rack")["fatal"], &row(1, "rack")["worst"][0]),
        (&1.into(), &"r1".into()),
        "{placed:#}"
    );
    let table = member.ctl(&["placement"]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    for word in ["ring, partners apart by rack", "LOST AT ONCE", "1 rack", "warning: node n"] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    let nodes = rows(member);
    assert_eq!(nodes.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), ["n1", "n2", "n3"]);
    for node in &nodes {
        assert_eq!(node["this"], node["name"] == "n2", "{node:#}");
        assert_eq!(node["coordinator"], node["name"] == "n1");
        assert_eq!(node["tier1_size_bytes"], 256 << 20, "{node:#}");
        assert_eq!(node["version"], nodes[0]["version"]);
    }
    // The third node saves, the first (the coordinator) knows of it, and the second is asked.
    fs::create_dir(members.mount(2).join("run")).unwrap();
    fs::write(members.mount(2).join("run/step_1.pt"), vec![5; BYTES]).unwrap();
    coordinator.wait_committed("run/step_1.pt", LIMIT);
    let mut listed = member.checkpoints();
    assert_eq!(listed.len(), 1, "{listed:#?}");
    assert_eq!(listed.remove(0)["state"], "committed");
    let shown_there = member.ctl_json(&["show", "run/step_1.pt"]);
    assert_eq!(shown_there["checkpoint"]["state"], "committed", "{shown_there:#}");
    let known = process::until(LIMIT, || {
        let status = member.ctl_json(&["status"]);
        (status["runs"][0]["watermark"]["path"] == "run/step_1.pt").then_some(())
    });
    assert!(known.is_some(), "{:#}", member.ctl_json(&["status"])["runs"]);
    assert_eq!(member.ctl(&["show", "run/absent.pt"]).status.code(), Some(3));
    let refused = member.ctl(&["gc"]);
    assert_eq!(refused.status.code(), Some(5));
    assert!(shown(&refused).contains("run it on node n1"), "{}", shown(&refused));
}

/// Goal: names under an exclusive lease need no question to another node.
#[test]
fn a_hundred_creates_in_a_directory_of_ones_own_ask_the_coordinator_nothing() {
    const CALLS: &str = "tidemark_coordinator_calls_total";
    let Some(members) = Members::start(&["r1", "r2", "r3"], "") else { return };
    let (coordinator, member) = (members.daemon(0), members.daemon(1));
    let own = members.mount(1).join("run");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("first"), b"1").unwrap();
    std::thread::sleep(COUNTED);
    let asked = || ["look", "list", "where", "join"].map(|call| calls(member, CALLS, call));
    let answered = || calls(coordinator, "tidemark_catalog_calls_total", "look");
    let (before, before_there) = (asked(), answered());
    let made = member.metric("tidemark_create_files_total", &[]);
    for file in 0..100 {
        fs::write(own.join(format!("shard_{file}")), b"bytes").unwrap();
    }
    std::thread::sleep(COUNTED);
    assert!(member.metric("tidemark_create_files_total", &[]) >= made + 100.0);
    assert_eq!(
        (asked(), answered()),
        (before, before_there),
        "look, list, where and join; look at the coordinator"
    );
    assert!(calls(member, CALLS, "publish") > 0.0 && calls(member, CALLS, "beat") > 0.0);
    // Once another node uses the directory, each create asks the coordinator.
    fs::write(members.mount(2).join("run/theirs"), b"3").unwrap();
    fs::write(own.join("mine"), b"2").unwrap();
    std::thread::sleep(COUNTED);
    assert!(asked()[0] > before[0], "{:?} and then {:?}", before, asked());
    assert!(answered() > before_there && calls(coordinator, "tidemark_catalog_calls_total", "recall") > 0.0);
}
