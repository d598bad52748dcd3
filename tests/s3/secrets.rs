//! Credentials and encryption: the environment's settings reach the store, and no reader of Tidemark's output sees secrets.
//!
//! Owns: a planted secret, all output of Tidemark that a person or a program can read, the headers of encryption. Does not own:
//! the sources of credentials (engine, `store::s3::config`).

use std::fs;
use std::path::Path;

use tidemark_tests::daemon::{Daemon, DaemonOptions, shown};
use tidemark_tests::machine;
use tidemark_tests::s3::{Fault, FaultEffect, S3Operation, S3Options, S3Server};

const SECRET: &str = "planted/SECRET+0f7c1d9e5b3a4826";
const WRONG: &str = "planted/WRONG+77aa1c0c5e0d4b19";
const KEY_ID: &str = "arn:aws:kms:us-east-1:111122223333:key/planted";
/// Log level that shows everything.
const LOUD: &str = "trace";

fn options(server: &S3Server, further: &[(&str, &str)]) -> DaemonOptions {
    let mut env = server.env();
    env.extend(further.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    DaemonOptions {
        tier1: "128MiB".into(),
        tier3: Some(server.url("p")),
        config: Some("[save]\nsettle_s = 0.3\n[tier3]\npaced = false\n".into()),
        env,
        ..DaemonOptions::default()
    }
}

fn save(daemon: &Daemon, name: &str) {
    // The large file is uploaded in parts.
    for (name, bytes) in [(format!("run/{name}.pt"), 20 << 20), (format!("run/{name}.txt"), 10)] {
        let path = daemon.mount().join(name);
        fs::create_dir_all(path.parent().expect("it lies in a run")).expect("a directory");
        fs::write(path, vec![7; bytes]).expect("saved");
    }
}

fn assert_silent(what: &str, said: &[u8]) {
    let said = String::from_utf8_lossy(said);
    for secret in [SECRET, WRONG] {
        assert!(!said.contains(secret), "{what} tells the secret:\n{said}");
    }
}

fn assert_files_silent(directory: &Path) {
    for entry in fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry")) {
        match entry.file_type().expect("a type") {
            kind if kind.is_dir() => assert_files_silent(&entry.path()),
            kind if kind.is_file() => {
                assert_silent(&entry.path().display().to_string(), &fs::read(entry.path()).expect("a file"));
            }
            _ => {}
        }
    }
}

#[test]
fn the_secret_signs_every_request_and_is_said_nowhere() {
    if !machine::can_mount() {
        return;
    }
    let server =
        S3Server::start(S3Options { secret: SECRET.into(), ..S3Options::default() }).expect("server");
    let daemon = Daemon::start(options(&server, &[("TIDEMARK_LOG", LOUD)]));
    // A failed request logs more than a successful one.
    for (operation, effect) in [
        (S3Operation::UploadPart, FaultEffect::Status500Before),
        (S3Operation::PutObject, FaultEffect::DropConnection),
        (S3Operation::GetObject, FaultEffect::WrongChecksumOnRead),
    ] {
        server.faults.add(Fault { operation, key_contains: String::new(), nth: Some(1), effect });
    }
    save(&daemon, "step1");
    daemon.flush();
    let environment = fs::read(format!("/proc/{}/environ", daemon.ready().pid)).expect("a process of ours");
    assert!(String::from_utf8_lossy(&environment).contains(SECRET), "it was planted");
    assert!(!server.objects("p").expect("objects").is_empty(), "it was used");

    let step = daemon.mount().join("run/step1.pt");
    let step = step.to_str().expect("UTF-8");
    let mut commands: Vec<Vec<&str>> =
        ["status", "ls", "tiers", "nodes", "events", "doctor"].map(|command| vec![command]).into();
    commands.extend([
        vec!["show", step, "--files"],
        vec!["verify", "--deep"],
        vec!["recover", "--plan"],
        vec!["gc", "-n"],
    ]);
    for command in commands {
        for format in ["table", "json"] {
            let output = daemon.ctl(&[&command[..], &["-o", format]].concat());
            assert_silent(&command.join(" "), shown(&output).as_bytes());
        }
    }
    for path in ["/metrics", "/status"] {
        assert_silent(path, daemon.http_get(path).as_bytes());
    }
    for (key, body) in server.objects("p").expect("objects") {
        assert_silent(&key, key.as_bytes());
        assert_silent(&key, &body);
    }
    assert_files_silent(&daemon.state_dir());
    let log = daemon.log();
    assert!(log.contains("TRACE"), "it says all that it can");
    assert_silent("the log", log.as_bytes());

    let refused =
        Daemon::start_refused(options(&server, &[("TIDEMARK_LOG", LOUD), ("AWS_SECRET_ACCESS_KEY", WRONG)]));
    assert!(!refused.status.success(), "the server checks signatures");
    assert_silent("a refusal", &[refused.stdout, refused.stderr].concat());
}

#[test]
fn what_the_environment_says_of_encryption_goes_with_every_object() {
    if !machine::can_mount() {
        return;
    }
    let server = S3Server::start(S3Options::default()).expect("server");
    let encryption = [("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms"), ("AWS_SSE_KMS_KEY_ID", KEY_ID)];
    let daemon = Daemon::start(options(&server, &encryption));
    save(&daemon, "step1");
    daemon.flush();
    let objects = server.objects("p").expect("objects");
    assert!(objects.keys().any(|key| key.ends_with("step1.pt")), "{:?}", objects.keys());
    for key in objects.keys() {
        let asked = server.encryption_of(&format!("p/{key}"));
        assert_eq!(asked.as_deref(), Some(&*format!("aws:kms {KEY_ID}")), "{key}");
    }
}
