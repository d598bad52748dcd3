//! A trainer of the crash campaign: a process that saves without end in one of eight ways. To the auditor it reports
//! each promise that it got.
//!
//! `tidemark-trainer KIND MOUNT FOLDER PAGE SEED` works in FOLDER, which is new, below MOUNT. The trainer shows its
//! current call on PAGE and prints events. Owns: the ways of saving. Does not own: anything of the daemon. If a system
//! call fails, the trainer reports it and ends.

mod acts;
mod calls;
mod small;
mod work;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tidemark_tests::campaign::event::Event;
use tidemark_tests::campaign::page::{Asked, Page};

use crate::acts::{Stop, Trainer};

/// Interval at which a paused trainer reads its page.
const POLL: Duration = Duration::from_millis(2);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, mount, folder, page, seed] = arguments.as_slice() else {
        return refuse("usage: tidemark-trainer KIND MOUNT FOLDER PAGE SEED");
    };
    let Ok(seed) = seed.parse() else { return refuse("SEED is a number") };
    let page = match Page::open(&PathBuf::from(page)) {
        Ok(page) => page,
        Err(error) => return refuse(&format!("{page}: {error}")),
    };
    // The kernel kills the trainer with its parent, so that a campaign that ends leaves no writer behind.
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return refuse(&format!("prctl: {error}"));
    }
    let mut trainer = Trainer::new(page, mount.into(), folder.clone(), seed);
    match run(&mut trainer, kind) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stop) => ExitCode::FAILURE,
    }
}

fn run(trainer: &mut Trainer, kind: &str) -> Result<(), Stop> {
    let round: fn(&mut Trainer) -> Result<(), Stop> = match kind {
        "sequential" => work::sequential,
        "bulk" => work::bulk,
        "mapped" => work::mapped,
        "renaming" => work::renaming,
        "direct" => work::direct,
        "append" => work::append,
        "unlinking" => work::unlinking,
        "small" => small::small,
        _ => {
            complain(&format!("no kind is called {kind}"));
            return Err(Stop);
        }
    };
    trainer.folders("")?;
    let mut told = 0;
    loop {
        match trainer.page.asked() {
            Asked::GoOn => round(trainer)?,
            Asked::End => return Ok(()),
            Asked::Pause(number) => {
                if told != number {
                    trainer.tell(&Event::Paused { number })?;
                    told = number;
                }
                std::thread::sleep(POLL);
            }
        }
    }
}

fn refuse(why: &str) -> ExitCode {
    complain(why);
    ExitCode::from(2)
}

#[expect(clippy::print_stderr, reason = "a program that cannot begin says why")]
fn complain(why: &str) {
    eprintln!("tidemark-trainer: {why}");
}
