//! System calls of frameworks that do not run here, in order, with a kill at each call: what does a job find that comes back?
//!
//! Owns: when a job is killed, and the demands on what it finds. Does not own: the orders and each framework's resume code
//! (`orders`), the processes (`job`). Sources of the orders: `engine/design/0010-recognition.md`.

mod job;
mod orders;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use job::{Job, State};
use orders::Framework;
use tidemark_tests::daemon::Daemon;
use tidemark_tests::{machine, process};

/// Limit until the right state is found. The daemon checks once a second which processes of a session live.
const FOUND_LIMIT: Duration = Duration::from_secs(40);
/// Duration of several of those checks. A state that is right by then stays so.
const STAYS: Duration = Duration::from_millis(2500);

#[test]
fn megatron() {
    cut_everywhere(&orders::MEGATRON);
}

#[test]
fn nemo() {
    cut_everywhere(&orders::NEMO);
}

#[test]
fn orbax() {
    cut_everywhere(&orders::ORBAX);
}

#[test]
fn torch_checkpointing() {
    cut_everywhere(&orders::TORCH_CHECKPOINTING);
}

#[test]
fn torchtitan() {
    cut_everywhere(&orders::TORCHTITAN);
}

#[test]
fn deepspeed() {
    cut_everywhere(&orders::DEEPSPEED);
}

/// Runs a job for each call of its second save, in a run of its own, and kills it in the middle of that call.
fn cut_everywhere(framework: &Framework) {
    if !machine::can_mount() {
        return;
    }
    let daemon = super::daemon("512MiB");
    let bytes = daemon.scratch("bytes");
    let calls = (framework.save)(2).len();
    let mut jobs = Vec::new();
    for cut in 0..=calls {
        let run = daemon.mount().join(format!("{}-cut{cut}", framework.name));
        fs::create_dir(&run).expect("a run of its own");
        let mut job = Job::start(&run, &bytes, framework.ranks, cut);
        job.does((framework.save)(1));
        jobs.push((run, job));
    }
    for (run, _) in &jobs {
        let whole = || is_found(framework, run, 1).ok();
        process::until(FOUND_LIMIT, whole).unwrap_or_else(|| panic!("{}: the first save", run.display()));
    }
    wait_committed(&daemon, jobs.len());
    let mut tore = 0;
    for (cut, (run, job)) in jobs.iter_mut().enumerate() {
        job.does_until((framework.save)(2), cut);
        tore += u32::from(cut < calls && is_found(framework, run, 2).is_err());
    }
    assert!(tore > 1, "the cuts are real: {tore} of {calls} leave something that is not whole");
    let runs: Vec<PathBuf> = jobs
        .into_iter()
        .map(|(run, job)| {
            job.kill();
            run
        })
        .collect();
    for (cut, run) in runs.iter().enumerate() {
        let steps: &[u64] = if cut == calls { &[2] } else { &[1, 2] };
        let right = || steps.iter().find_map(|step| is_found(framework, run, *step).ok());
        process::until(FOUND_LIMIT, right).unwrap_or_else(|| {
            let found = is_found(framework, run, 1);
            panic!("{} killed in call {cut}: {found:?}\n{:#?}", framework.name, daemon.checkpoints())
        });
    }
    std::thread::sleep(STAYS);
    for (cut, run) in runs.iter().enumerate() {
        let found = [1, 2].map(|step| is_found(framework, run, step));
        assert!(found.iter().any(Result::is_ok), "{} killed in call {cut}: {found:?}", framework.name);
    }
}

fn wait_committed(daemon: &Daemon, versions: usize) {
    let committed = || {
        let rows = daemon.checkpoints();
        (rows.iter().filter(|row| row["state"] == "committed").count() >= versions).then_some(())
    };
    process::until(FOUND_LIMIT, committed)
        .unwrap_or_else(|| panic!("the first saves are not committed: {:#?}", daemon.checkpoints()));
}

/// Checks that the framework's resume code chooses that step, and finds all of it as written.
fn is_found(framework: &Framework, run: &Path, step: u64) -> Result<(), String> {
    let found = (framework.resume)(run);
    if found != Some(step) {
        return Err(format!("resumes at {found:?}"));
    }
    for (path, bytes) in State::after((framework.save)(step)).files {
        match fs::read(run.join(&path)) {
            Ok(read) if read == bytes => {}
            Ok(read) => return Err(format!("{path} has {} bytes, others than were saved", read.len())),
            Err(error) => return Err(format!("{path}: {error}")),
        }
    }
    Ok(())
}
