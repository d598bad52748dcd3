//! An etcd as in production: with TLS, client certificates, and a user who may use one prefix.
//!
//! Does not own: the lease itself (`lease`), a cluster whose coordinator is lost (`failover`).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::etcd::{Etcd, guard};
use tidemark_tests::machine;
use tidemark_tests::net::{Host, Network, Node};
use tidemark_tests::process;
use tidemark_transport::certs;

use crate::site::LIMIT;

/// Limit of a start that is refused, which takes some tenths of a second on an idle machine.
const REFUSED_WITHIN: Duration = Duration::from_secs(15);

struct Site {
    folder: tempfile::TempDir,
    etcd: Etcd,
}

impl Site {
    fn password(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, text).expect("the folder of a test");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("a mode");
        path
    }

    /// Returns the options of a node with `password` or without a user. If `authority` is given, the node trusts it instead of etcd's.
    fn options(&self, password: Option<&Path>, authority: Option<&Path>) -> DaemonOptions {
        let mut keys = self.etcd.client_files();
        if let Some(path) = authority {
            let own = keys.lines().filter(|line| !line.starts_with("ca ")).map(|line| format!("{line}\n"));
            keys = format!("ca = {path:?}\n{}", own.collect::<String>());
        }
        if let Some(path) = password {
            keys.push_str(&format!("user = {:?}\npassword_file = {path:?}\n", guard::USER));
        }
        let config = format!("[save]\nsettle_s = 0.5\n[etcd]\n{keys}");
        let flags = [
            ("--certs", self.folder.path().join("certs").display().to_string()),
            ("--etcd", self.etcd.url("ckpt")),
        ];
        DaemonOptions {
            tier1: "256MiB".into(),
            config: Some(config),
            tier3: Some(format!("file://{}", self.folder.path().join("tier3").display())),
            flags: flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect(),
            ..DaemonOptions::default()
        }
    }

    fn refused(&self, host: &Host, options: DaemonOptions) -> String {
        let mut options = DaemonOptions { host: Some(host.clone()), ..options };
        options.flags.extend(["--name".into(), host.name().into()]);
        let began = Instant::now();
        let output = Daemon::start_refused(options);
        let said = shown(&output);
        assert!(began.elapsed() < REFUSED_WITHIN, "after {:?}: {said}", began.elapsed());
        assert_eq!(output.status.code(), Some(5), "{said}");
        assert!(!said.contains("ready:") && !said.contains(guard::PASSWORD), "{said}");
        said
    }
}

/// Goal: two nodes form a cluster through an etcd with all its checks. A node with a wrong password, one without a user, and one that
/// trusts another authority do not start and say why. If the password was changed, and the coordinator is lost after that, the other node
/// still takes its place.
#[test]
fn an_etcd_with_tls_client_certificates_and_users_carries_a_cluster() {
    if !machine::can_mount() {
        return;
    }
    let Some(network) = Network::make(&["n1", "n2", "etcd"]) else { return };
    let (n1, n2) = (network.host("n1"), network.host("n2"));
    let Some(etcd) = Etcd::start_guarded_on(network.host("etcd"), "ckpt") else { return };
    let site = Site { folder: tempfile::tempdir().expect("a temporary directory"), etcd };
    let at = |name: &str| site.folder.path().join(name);
    fs::create_dir(at("tier3")).expect("the folder of a test");
    certs::init(&at("certs"), "tidemark").expect("an authority");
    for host in [n1, n2] {
        certs::issue(&at("certs"), host.name(), &[host.address().to_string()]).expect("a certificate");
    }
    let password = site.password("password", &format!("{}\n", guard::PASSWORD));

    let wrong = site.password("wrong", "hunter2\n");
    let said = site.refused(n1, site.options(Some(&wrong), None));
    for words in ["refuses the password of user", &site.etcd.endpoint(), &wrong.display().to_string()] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!said.contains("hunter2"), "{said}");
    guard::foreign_authority(&at("foreign.pem"));
    let said = site.refused(n1, site.options(Some(&password), Some(&at("foreign.pem"))));
    assert!(said.contains("UnknownIssuer") && said.contains("[etcd] ca"), "{said}");
    // The node must not become the user that the common name of etcd's own certificate may name.
    let said = site.refused(n1, site.options(None, None));
    assert!(said.contains("user name is empty") && said.contains("[etcd] user"), "{said}");

    let mut first = Node::start(n1, site.options(Some(&password), None));
    let taken = |node: &Node| node.daemon().log().contains("the seat is taken");
    assert!(process::until(LIMIT, || taken(&first).then_some(())).is_some(), "{}", first.daemon().log_tail());
    let second = Node::start(n2, site.options(Some(&password), None));
    fs::write(first.daemon().mount().join("a.txt"), "from the first").expect("a file");
    let read = process::until(LIMIT, || fs::read_to_string(second.daemon().mount().join("a.txt")).ok());
    assert_eq!(read.as_deref(), Some("from the first"));

    // The file changes first, since etcd ends the tokens of a user whose password changes. A rename replaces it, as in a secret store.
    fs::rename(site.password("newer", "a newer password\n"), &password).expect("the folder of a test");
    site.etcd.change_password("a newer password");
    first.power_off();
    assert!(
        process::until(LIMIT, || taken(&second).then_some(())).is_some(),
        "{}",
        second.daemon().log_tail()
    );
    fs::write(second.daemon().mount().join("b.txt"), "from the second").expect("the second node decides");
    for password in [guard::PASSWORD, "a newer password"] {
        assert!(!second.daemon().log().contains(password), "a password is in the log");
    }
}
