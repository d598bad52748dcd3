//! What `ckptctl` exits with when it is asked about a path.
//!
//! Owns: not found (3) against found. Does not own: how answers look (the tests of ckptctl).

use std::fs;

use tidemark_tests::daemon::shown;

use crate::site::{CONFIG, noise, options, save, start};

#[test]
fn a_path_that_names_nothing_is_not_found() {
    let Some(mut daemon) = start(options("256MiB", CONFIG)) else { return };
    save(&daemon, "run/step_1/model_rank0.pt", &noise(1, 70_000));
    save(&daemon, "run/step_1/model_rank1.pt", &noise(2, 70_000));
    save(&daemon, "run/step2.pt", &noise(3, 70_000));
    save(&daemon, "run/notes.txt", b"loose");
    fs::create_dir(daemon.mount().join("empty")).unwrap();
    daemon.flush();
    let code = |words: &[&str]| {
        let output = daemon.ctl(words);
        (output.status.code(), shown(&output))
    };
    for path in ["absent", "run/absent.pt", "run/step_1/absent", "run/step2.pt/absent", "runaway"] {
        let commands: [&[&str]; 7] = [
            &["verify"],
            &["verify", "--deep"],
            &["show"],
            &["flush"],
            &["flush", "--wait"],
            &["commit"],
            &["ls"],
        ];
        for command in commands {
            let (code, shown) = code(&[command, &[path]].concat());
            assert_eq!(code, Some(3), "ckptctl {command:?} {path}: {shown}");
            assert!(shown.contains(path), "the path is named: {shown}");
        }
    }
    for words in [
        &["verify", "run"][..],
        &["verify", "run/notes.txt"],
        &["verify", "run/step_1/model_rank0.pt"],
        &["show", "run/step_1/model_rank0.pt"],
        &["show", "run/step2.pt"],
        &["flush", "--wait", "run"],
        &["flush", "empty"],
        &["commit", "run/step_1"],
        &["ls", "empty"],
        &["ls", "run/notes.txt"],
        &["ls", ""],
    ] {
        let words: Vec<_> = words.iter().copied().filter(|word| !word.is_empty()).collect();
        let (code, shown) = code(&words);
        assert_eq!(code, Some(0), "ckptctl {words:?}: {shown}");
    }
    // A loose file and a directory of several are no checkpoint.
    for words in [&["show", "run/notes.txt"], &["show", "empty"], &["commit", "run"]] {
        assert_eq!(code(words).0, Some(3), "ckptctl {words:?}: {}", code(words).1);
    }
    // What the job removed is still listed, and has no file in the tree that could be verified.
    fs::remove_file(daemon.mount().join("run/step2.pt")).unwrap();
    daemon.flush();
    for (words, expected) in
        [(&["ls", "run/step2.pt"], 0), (&["show", "run/step2.pt"], 0), (&["verify", "run/step2.pt"], 3)]
    {
        let output = daemon.ctl(words);
        assert_eq!(output.status.code(), Some(expected), "ckptctl {words:?}: {}", shown(&output));
    }
    daemon.stop();
}
