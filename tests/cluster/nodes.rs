//! A daemon on each host: where it listens, which hosts reach it, and that nothing is left of a lost node.
//!
//! Does not own: the cluster's reaction to a loss.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use tidemark_tests::daemon::{Daemon, DaemonOptions, http_get_from, is_mounted, shown};
use tidemark_tests::machine;
use tidemark_tests::net::{Network, Node};
use tidemark_tests::process;
use tidemark_transport::certs;

const LIMIT: Duration = Duration::from_secs(30);
const BYTES: usize = 3 << 20;

fn node(network: &Network, name: &str) -> Node {
    let config = Some("[save]\nsettle_s = 0.2\n[tier3]\npaced = false\n".to_owned());
    let options = DaemonOptions { tier1: "256MiB".into(), config, ..DaemonOptions::default() };
    Node::start(network.host(name), options)
}

#[test]
fn each_host_has_a_daemon_of_its_own_and_a_lost_one_leaves_nothing() {
    if !machine::can_mount() {
        return;
    }
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let (mut first, second) = (node(&network, "n1"), node(&network, "n2"));
    let mut saved = vec![];
    for node in [&first, &second] {
        let (host, daemon) = (node.host(), node.daemon());
        daemon.assert_passthrough();
        let ready = daemon.ready();
        assert_eq!(ready.node, host.name());
        for address in [&ready.listen, &ready.http] {
            let address: SocketAddr = address.parse().unwrap();
            assert_eq!(address.ip(), host.address());
            assert_ne!(address.port(), 0);
        }
        // Every process of this machine sees the mount.
        let bytes = vec![host.address().octets()[3]; BYTES];
        std::fs::write(daemon.mount().join("step1.pt"), &bytes).unwrap();
        daemon.flush();
        saved.push(bytes);
        assert!(daemon.metric("tidemark_tier1_warm_ratios", &[]) >= 0.0);
    }
    // The other host reads over the network.
    let http = first.daemon().ready().http.clone();
    let asked = second.host().inside(|| http_get_from(&http, "/healthz"));
    assert!(asked.is_ok(), "{asked:?}");

    // A process of the job runs on the node that is lost, and one on the node that is not.
    let sleep = || {
        let mut command = std::process::Command::new("sleep");
        command.arg("600");
        command
    };
    let mut lost = first.host().spawn(&mut sleep()).unwrap();
    let mut kept = second.host().spawn(&mut sleep()).unwrap();
    let (mount, serving) = (first.daemon().mount().to_path_buf(), first.daemon().serving_pid().unwrap());
    let keeper = first.daemon().keeper_pid();
    let killed = first.power_off();
    for pid in [keeper, serving, lost.id()] {
        assert!(killed.contains(&pid), "{pid} is not among {killed:?}");
        assert!(!process::is_alive(pid));
    }
    assert!(!is_mounted(&mount));
    assert!(process::wait(&mut lost, LIMIT).unwrap().is_some());
    let asked = second
        .host()
        .inside(|| TcpStream::connect_timeout(&http.parse().unwrap(), Duration::from_millis(500)));
    let told = asked.unwrap_err().kind();
    assert!(
        matches!(told, ErrorKind::TimedOut | ErrorKind::HostUnreachable),
        "without power, it says {told}"
    );
    assert!(first.isolation().unwrap().dropped_packets() > 0);
    // The process on the other node is not affected.
    assert!(kept.try_wait().unwrap().is_none());
    assert_eq!(std::fs::read(second.daemon().mount().join("step1.pt")).unwrap(), saved[1]);

    first.power_on();
    assert_eq!(first.daemon().checkpoint("step1.pt").unwrap()["copies"]["host"]["bytes"], 0);
    assert_eq!(std::fs::read(first.daemon().mount().join("step1.pt")).unwrap(), saved[0]);
    kept.kill().unwrap();
    kept.wait().unwrap();
}

/// Goal: a node that a coordinator refuses serves no mount, because each name in it would be EIO. The node reports why and ends.
/// If the coordinator is away, a node waits for it, reports so, and ends in order when told to.
#[test]
fn a_node_that_no_coordinator_lets_in_mounts_nothing_and_says_why() {
    if !machine::can_mount() {
        return;
    }
    let Some(network) = Network::make(&["n1", "n2", "n3"]) else { return };
    let folder = tempfile::tempdir().expect("a temporary directory");
    let issued = |authority: &str, name: &str| {
        let certificates = folder.path().join(authority);
        if !certificates.exists() {
            certs::init(&certificates, "tidemark").expect("an authority");
        }
        certs::issue(&certificates, name, &[network.host(name).address().to_string()])
            .expect("a certificate");
        certificates.display().to_string()
    };
    let tier3 = folder.path().join("tier3");
    std::fs::create_dir(&tier3).expect("a directory");
    let options = |authority: &str, name: &str, more: &[String]| {
        let mut flags = vec!["--certs".to_owned(), issued(authority, name)];
        flags.extend_from_slice(more);
        let tier3 = Some(format!("file://{}", tier3.display()));
        DaemonOptions { tier1: "256MiB".into(), tier3, flags, ..DaemonOptions::default() }
    };
    let first = Node::start(network.host("n1"), options("ours", "n1", &[]));
    let coordinator = ["--coordinator".to_owned(), format!("n1@{}", first.daemon().ready().listen)];

    let mut foreign = options("another", "n2", &coordinator);
    foreign.host = Some(network.host("n2").clone());
    foreign.flags.extend(["--name".into(), "n2".into()]);
    let refused = Daemon::start_refused(foreign);
    let said = shown(&refused);
    assert_eq!(refused.status.code(), Some(5), "{said}");
    assert!(!said.contains("ready:") && said.contains("does not let this node in"), "{said}");
    assert!(said.contains("certificate"), "it says why: {said}");

    let nobody = ["--coordinator".to_owned(), format!("n1@{}:9", network.host("n1").address())];
    let waits = options("ours", "n3", &nobody);
    let (mut child, said) = Daemon::start_without_waiting(waits, network.host("n3"));
    let warned = || said().contains("no coordinator has let this node in").then_some(());
    assert!(process::until(LIMIT, warned).is_some(), "{}", said());
    process::signal(child.id(), rustix::process::Signal::TERM);
    let ended = process::wait(&mut child, LIMIT).expect("waiting for ckptd").expect("it ends when told to");
    assert_eq!(ended.code(), Some(0), "{}", said());
    assert!(!said().contains("ready:"), "{}", said());
}
