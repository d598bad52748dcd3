//! Bad input at start is refused with the right exit code and a message that says what to do. Nothing is left mounted.
//!
//! Owns: input that `ckptd up` refuses. Does not own: bad input while it serves (`documents`, `away`).

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use tempfile::TempDir;
use tidemark_tests::daemon::{Daemon, DaemonOptions, is_mounted, shown};
use tidemark_tests::s3::{S3Options, S3Server};
use tidemark_tests::{machine, process};

use crate::site::{CONFIG, assert_holds, noise, options, save, start};

/// Limit of a refusal. A store that does not answer is tried a few times before it is called unreachable.
const REFUSAL_LIMIT: Duration = Duration::from_secs(90);

/// Options of a `ckptd up`. The harness's daemon is not used, because it would clean up mounts, which are the subject here.
struct Try {
    home: TempDir,
    mountpoint: Option<String>,
    tier1: String,
    tier3: Option<String>,
    state_dir: Option<String>,
    config: Option<String>,
    env: Vec<(String, String)>,
    /// Script that runs before the daemon, in a mount namespace of its own.
    before: Option<String>,
}

impl Try {
    fn new() -> Self {
        let home = tempfile::Builder::new().prefix("tidemark-").tempdir().expect("a temporary directory");
        Self {
            home,
            mountpoint: None,
            tier1: "128MiB".into(),
            tier3: None,
            state_dir: None,
            config: None,
            env: vec![],
            before: None,
        }
    }

    fn path(&self, name: &str) -> String {
        self.home.path().join(name).to_str().expect("text").to_owned()
    }

    /// Asserts the exit code and the words, and that stdout is empty and nothing is mounted.
    fn refused(&self, code: i32, words: &[&str]) -> String {
        let output = self.run();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{}", shown(&output));
        assert!(output.stdout.is_empty(), "a refused daemon is not ready: {}", shown(&output));
        // A person reads the last message, which may have several lines.
        let last = text.find("ckptd: ").map_or("", |at| &text[at..]);
        for word in words {
            assert!(last.contains(word), "{word:?} is not in {last:?}; all of it: {text}");
        }
        if self.mountpoint.is_none() {
            let mountpoint = self.path("ckpt");
            assert!(!is_mounted(Path::new(&mountpoint)), "{mountpoint} is mounted");
        }
        last.to_owned()
    }

    fn run(&self) -> Output {
        let words = [
            "up".to_owned(),
            self.mountpoint.clone().unwrap_or_else(|| self.path("ckpt")),
            format!("--tier1={}", self.tier1),
            format!(
                "--tier3={}",
                self.tier3.clone().unwrap_or_else(|| format!("file://{}", self.path("t3")))
            ),
            format!("--state-dir={}", self.state_dir.clone().unwrap_or_else(|| self.path("state"))),
            "--listen=127.0.0.1:0".to_owned(),
            "--http=127.0.0.1:0".to_owned(),
        ];
        let binary = machine::binary("ckptd");
        let mut command = match &self.before {
            Some(before) => {
                let mut command = Command::new("unshare");
                let script = format!("{before}\nexec \"$0\" \"$@\"");
                command.args(["--mount", "sh", "-e", "-c", &script]).arg(binary);
                command
            }
            None => Command::new(binary),
        };
        command.args(words).envs(self.env.iter().map(|(name, value)| (name, value)));
        if let Some(config) = &self.config {
            let path = self.path("ckptd.toml");
            fs::write(&path, config).expect("a configuration file");
            command.arg("--config").arg(path);
        }
        process::run(&mut command, REFUSAL_LIMIT)
    }
}

#[test]
fn a_mountpoint_that_is_not_empty_is_refused_and_left_as_it_is() {
    if !machine::can_mount() {
        return;
    }
    let refused = Try::new();
    let mountpoint = refused.path("ckpt");
    fs::create_dir(&mountpoint).unwrap();
    fs::write(format!("{mountpoint}/precious"), "mine").unwrap();
    refused.refused(1, &[&mountpoint, "not empty", "precious", "choose another"]);
    assert_eq!(fs::read_to_string(format!("{mountpoint}/precious")).unwrap(), "mine");
    fs::remove_dir_all(&mountpoint).unwrap();
    fs::write(&mountpoint, "a file").unwrap();
    refused.refused(1, &[&mountpoint, "director"]);
    assert_eq!(fs::read_to_string(&mountpoint).unwrap(), "a file");
}

#[test]
fn a_live_mount_is_refused_and_serves_on() {
    let Some(daemon) = start(options("128MiB", CONFIG)) else { return };
    let bytes = noise(1, 100_001);
    save(&daemon, "run/step1.pt", &bytes);
    let mountpoint = daemon.mount().to_str().unwrap().to_owned();
    Try { mountpoint: Some(mountpoint.clone()), ..Try::new() }.refused(1, &[&mountpoint, "mount"]);
    assert_holds(&daemon, "run/step1.pt", &bytes, "in the live mount");
    daemon.flush();
}

#[test]
fn a_dead_mount_is_unmounted_first() {
    let Some(dead) = start(options("128MiB", CONFIG)) else { return };
    let mountpoint = dead.mount().to_owned();
    let bytes = noise(2, 100_001);
    save(&dead, "run/step1.pt", &bytes);
    dead.flush();
    // `kill9` would take the dead mount away.
    process::kill_node(dead.keeper_pid());
    let gone = process::until(Duration::from_secs(20), || {
        matches!(fs::read_dir(&mountpoint), Err(error) if error.raw_os_error() == Some(libc::ENOTCONN))
            .then_some(())
    });
    assert!(gone.is_some() && is_mounted(&mountpoint), "there is a dead mount");
    let tier3 = format!("file://{}", dead.tier3_dir().display());
    let again =
        DaemonOptions { mountpoint: Some(mountpoint), tier3: Some(tier3), ..options("128MiB", CONFIG) };
    let mut daemon = Daemon::start(again);
    assert_holds(&daemon, "run/step1.pt", &bytes, "after a dead mount");
    daemon.stop();
}

#[test]
fn a_second_daemon_on_one_state_directory_is_refused() {
    let Some(mut daemon) = start(options("128MiB", CONFIG)) else { return };
    let state_dir = daemon.state_dir().to_str().unwrap().to_owned();
    let pid = daemon.keeper_pid().to_string();
    Try { state_dir: Some(state_dir.clone()), ..Try::new() }.refused(1, &[&state_dir, &pid, "--state-dir"]);
    daemon.ctl_json(&["status"]);
    // A socket without a listener, as SIGKILL leaves it, is replaced.
    daemon.kill9();
    assert!(daemon.state_dir().join("ckptd.sock").exists());
    daemon.start_again();
    daemon.stop();
}

#[test]
fn a_machine_without_dev_fuse_is_told_so() {
    if !machine::can_mount() {
        return;
    }
    let before =
        "mount -t tmpfs none /dev; mknod /dev/null c 1 3; mknod /dev/zero c 1 5; mknod /dev/urandom c 1 9";
    Try { before: Some(before.into()), ..Try::new() }.refused(1, &["/dev/fuse"]);
}

#[test]
fn a_tier3_url_that_is_malformed_is_refused_as_usage() {
    if !machine::can_mount() {
        return;
    }
    for (url, word) in [
        ("gopher://x/y", "s3://"),
        ("/just/a/path", "file://"),
        ("", "file://"),
        ("s3://", "bucket"),
        ("file://relative/path", "file:///"),
    ] {
        // An argument that cannot be right is a usage error, found before any request to a store.
        let text = Try { tier3: Some(url.into()), ..Try::new() }.refused(2, &[word]);
        assert!(text.contains(url), "{text}");
    }
}

#[test]
fn a_tier3_that_cannot_be_reached_is_unavailable() {
    if !machine::can_mount() {
        return;
    }
    // The port was bound and dropped, so no process listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let env = [
        ("AWS_ENDPOINT_URL", endpoint.as_str()),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "s3cr3t-of-the-test"),
        ("AWS_REGION", "us-east-1"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let text = Try { tier3: Some("s3://bucket/p".into()), env, ..Try::new() }.refused(5, &["s3://bucket/p"]);
    assert!(text.contains(&endpoint) || text.contains(&port.to_string()), "which endpoint: {text}");
    assert!(!text.contains("s3cr3t"), "{text}");
}

#[test]
fn a_read_only_tier3_is_refused() {
    if !machine::can_mount() {
        return;
    }
    let refused = Try::new();
    let folder = refused.path("t3");
    fs::create_dir(&folder).unwrap();
    // chmod does not stop root, but a read-only mount does, in a namespace that ends with the process.
    let before = format!("mount --bind '{folder}' '{folder}'; mount -o remount,bind,ro '{folder}'");
    Try { before: Some(before), ..refused }.refused(5, &[&folder, "read"]);
}

#[test]
fn wrong_credentials_and_a_missing_bucket_are_refused() {
    if !machine::can_mount() {
        return;
    }
    let server = S3Server::start(S3Options::default()).unwrap();
    let with = |name: &str, value: &str| {
        let mut env = server.env();
        env.retain(|(known, _)| known != name);
        env.push((name.to_owned(), value.to_owned()));
        env
    };
    for (name, value) in [("AWS_SECRET_ACCESS_KEY", "wr0ng-secret"), ("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")] {
        let text = Try { tier3: Some(server.url("p")), env: with(name, value), ..Try::new() }
            .refused(5, &[&server.url("p"), "AWS_SECRET_ACCESS_KEY"]);
        assert!(!text.contains("wr0ng-secret") && !text.contains(&server.secret), "{text}");
    }
    Try { tier3: Some("s3://no-such-bucket/p".into()), env: server.env(), ..Try::new() }
        .refused(5, &["s3://no-such-bucket", "create the bucket"]);
    let read_only = S3Server::start(S3Options { read_only: true, ..S3Options::default() }).unwrap();
    Try { tier3: Some(read_only.url("p")), env: read_only.env(), ..Try::new() }.refused(5, &["AccessDenied"]);
    // With the right credentials, the same URL is accepted. The refusals above were thus about credentials.
    let tier3 = Some(server.url("p"));
    let mut daemon = Daemon::start(DaemonOptions { tier3, env: server.env(), ..options("128MiB", CONFIG) });
    daemon.stop();
}

#[test]
fn a_configuration_with_an_unknown_key_or_a_value_that_cannot_be_is_usage() {
    if !machine::can_mount() {
        return;
    }
    for (config, words) in [
        ("[save]\nsetle_s = 1.0\n", &["setle_s", "settle_s"][..]),
        ("[tier9]\n", &["tier9"]),
        ("[save]\nsettle_s = -1.0\n", &["save.settle_s", "-1"]),
        ("[save]\nsettle_s = nan\n", &["save.settle_s"]),
        ("[tier3]\npart_bytes = 5000000\n", &["tier3.part_bytes", "8 MiB"]),
        ("this is no TOML\n", &["ckptd.toml"]),
        ("[node]\ncluster = \"a b\"\n", &["node.cluster", "a b"]),
        ("[node]\nadvertise = \"somewhere\"\n", &["node.advertise", "somewhere"]),
        ("[tier1]\ndirectory = \"\"\n", &["tier1.directory"]),
        ("[tier1]\ndirectory = \"\\u0000\"\n", &["tier1.directory", "NUL"]),
        (
            "[spill]\ndirectory = \"/nowhere/spill\"\nbudget = \"1GiB\"\n",
            &["spill.directory", "/nowhere/spill"],
        ),
        ("[retention.runs.\"/r\"]\nkeep_last = 10\n", &["retention.runs.\"/r\"", "team/run7"]),
        ("[retention.runs.\"r/\"]\nkeep_last = 10\n", &["retention.runs.\"r/\"", "_ for the mount"]),
        ("[compression.runs.\"../r\"]\ncodec = \"zstd\"\n", &["compression.runs.\"../r\""]),
        ("[retention]\nkeep_every_steps = 0\n", &["retention.keep_every_steps", "leave the key out"]),
    ] {
        Try { config: Some(config.into()), ..Try::new() }.refused(2, words);
    }
    for state_dir in ["/", "/run/.."] {
        let words = ["node.state_dir", "of its own"];
        Try { state_dir: Some(state_dir.into()), ..Try::new() }.refused(2, &words);
    }
}

#[test]
fn a_wrong_lease_or_certificate_is_found_before_anything_is_written_to_tier3() {
    if !machine::can_mount() {
        return;
    }
    for (config, words) in [
        ("[node]\nlease = \"foo\"\n", &["lease", "foo", "--etcd"][..]),
        ("[node]\nlease = \"file:\"\n", &["lease", "file:PATH"]),
        ("[node]\ncerts = \"/nowhere/certs\"\n", &["certificates", "/nowhere/certs"]),
    ] {
        let refused = Try { config: Some(config.into()), ..Try::new() };
        refused.refused(2, words);
        assert!(!Path::new(&refused.path("t3")).exists(), "{config}: Tier-3 was asked first");
    }
}

#[test]
fn a_budget_larger_than_memory_or_too_small_is_usage() {
    if !machine::can_mount() {
        return;
    }
    for (tier1, words) in [
        ("100TiB", &["--tier1", "100TiB", "ask for less"][..]),
        ("1MiB", &["--tier1", "1MiB"]),
        ("many", &["--tier1", "many"]),
        ("-5GiB", &["--tier1"]),
        ("99999999999999999999GiB", &["--tier1"]),
    ] {
        Try { tier1: tier1.into(), ..Try::new() }.refused(2, words);
    }
    let refused = Try::new();
    let output = process::run(Command::new(machine::binary("ckptd")).arg("up"), REFUSAL_LIMIT);
    assert_eq!(output.status.code(), Some(2), "no mountpoint: {}", shown(&output));
    let config = refused.path("nowhere.toml");
    let mut command = Command::new(machine::binary("ckptd"));
    command.args(["up", &refused.path("ckpt"), "--config", &config]);
    let output = process::run(&mut command, REFUSAL_LIMIT);
    assert_eq!(output.status.code(), Some(2), "a configuration that is not there: {}", shown(&output));
    assert!(String::from_utf8_lossy(&output.stderr).contains(&config), "{}", shown(&output));
}

#[test]
fn a_mountpoint_that_is_a_volume_is_refused_with_a_place_inside_it() {
    if !machine::can_mount() {
        return;
    }
    let refused = Try::new();
    let mountpoint = refused.path("ckpt");
    fs::create_dir_all(&mountpoint).unwrap();
    let before = format!("mount --bind '{mountpoint}' '{mountpoint}'");
    Try { before: Some(before), ..refused }.refused(1, &[&mountpoint, "a directory inside it"]);
}

#[test]
fn too_few_descriptors_to_start_with_are_named() {
    if !machine::can_mount() {
        return;
    }
    let before = "exec setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource prlimit --nofile=100:100 \"$0\" \"$@\"";
    Try { before: Some(before.into()), ..Try::new() }
        .refused(1, &["100 files", "at least 128", "LimitNOFILE"]);
}

#[test]
fn a_state_directory_of_another_user_or_of_all_is_refused() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
    if !machine::can_mount() {
        return;
    }
    let shared = Try::new();
    let directory = shared.path("shared");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)).unwrap();
    Try { state_dir: Some(directory.clone()), ..shared }.refused(1, &[&directory, "1777", "--state-dir"]);

    let theirs = Try::new();
    let (directory, precious) = (theirs.path("theirs"), theirs.path("precious"));
    fs::create_dir(&directory).unwrap();
    fs::write(&precious, "precious").unwrap();
    for name in ["status.json.new", "status.json", "keeper.json", "lock"] {
        symlink(&precious, format!("{directory}/{name}")).unwrap();
    }
    chown(&directory, Some(65534), Some(65534)).unwrap();
    let kept = Try { state_dir: Some(directory.clone()), ..theirs };
    kept.refused(1, &[&directory, "user 65534", "--state-dir"]);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    assert_eq!(fs::metadata(&directory).unwrap().uid(), 65534);
}

#[test]
fn a_start_that_waits_for_a_mute_tier3_says_so_and_ends_when_it_is_told() {
    if !machine::can_mount() {
        return;
    }
    // The kernel takes connections, and no process ever answers.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", mute.local_addr().unwrap());
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    let log = fs::File::create(path("log")).unwrap();
    let mut command = Command::new(machine::binary("ckptd"));
    command.arg("up").arg(path("ckpt")).arg("--state-dir").arg(path("state"));
    command.args(["--tier1=128MiB", "--tier3=s3://b/p", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]);
    command.envs([("AWS_ENDPOINT_URL", endpoint.as_str()), ("AWS_REGION", "us-east-1")]);
    command.envs([("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")]);
    let mut starting = command.stdout(std::process::Stdio::null()).stderr(log).spawn().unwrap();
    let said = process::until(Duration::from_secs(5), || {
        fs::read_to_string(path("log")).unwrap().contains("Tier-3 has not answered yet").then_some(())
    });
    assert!(said.is_some(), "{}", fs::read_to_string(path("log")).unwrap());
    process::signal(starting.id(), rustix::process::Signal::TERM);
    let ended = process::wait(&mut starting, Duration::from_secs(6)).unwrap();
    assert_eq!(
        ended.and_then(|status| status.code()),
        Some(0),
        "{}",
        fs::read_to_string(path("log")).unwrap()
    );
    assert!(!is_mounted(&path("ckpt")));
}
