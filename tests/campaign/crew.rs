//! The trainers: real processes, started, paused, killed and started again. Their events go into the book.
//!
//! Owns: the processes, their pages and the threads that read them. Does not own: when a trainer is killed (`rounds`),
//! the meaning of the events (`claims`).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::campaign::event::Event;
use tidemark_tests::campaign::page::{Act, ActFigures, Asked, Doing, Page};
use tidemark_tests::process;

use crate::claims::Claims;

/// The kind of each trainer. Quick kinds appear more than once, so that at most moments some call of each sort is under way.
const KINDS: [&str; 12] = [
    "bulk",
    "sequential",
    "sequential",
    "mapped",
    "direct",
    "append",
    "unlinking",
    "small",
    "small",
    "renaming",
    "renaming",
    "renaming",
];
/// Limit of a pause. Calls that wait for the daemon are answered after its restart, and each trainer first ends its round.
const PAUSE_LIMIT: Duration = Duration::from_secs(60);
/// Limit of the wait for each trainer that is left when a campaign has failed.
const LEFT_LIMIT: Duration = Duration::from_secs(1);
/// Folders of dead trainers that are kept for each place, so that their files are compared for some rounds.
const DEAD_FOLDERS_KEPT: usize = 1;

/// The reports of all trainers.
#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) claims: Claims,
    /// The last pause that the trainer at each place has begun.
    paused: Vec<u64>,
    failures: Vec<Failure>,
}

/// A system call that failed, and when.
#[derive(Clone, Debug)]
struct Failure {
    at_ns: u64,
    what: String,
}

/// A place at the machine, taken by one trainer after another.
#[derive(Debug)]
struct Seat {
    kind: &'static str,
    lives: u64,
    folder: String,
    page: Page,
    running: Option<(Child, JoinHandle<()>)>,
    dead_folders: Vec<String>,
}

/// All places. Dropping the crew kills its trainers.
#[derive(Debug)]
pub(crate) struct Crew {
    seats: Vec<Seat>,
    book: Arc<Mutex<Book>>,
    dice: Dice,
    mount: PathBuf,
    /// Folder of this life of the node, below the mount.
    pub(crate) top: String,
    pauses: u64,
    figures: BTreeMap<Act, ActFigures>,
}

impl Crew {
    /// Makes a crew in which no trainer runs yet.
    pub(crate) fn new(mount: &Path, pages: &Path, seed: u64) -> Self {
        let seat = |(number, kind): (usize, &&'static str)| Seat {
            kind,
            lives: 0,
            folder: String::new(),
            page: Page::create(&pages.join(number.to_string())).expect("a page"),
            running: None,
            dead_folders: vec![],
        };
        let seats: Vec<Seat> = KINDS.iter().enumerate().map(seat).collect();
        let book = Book { paused: vec![0; seats.len()], ..Book::default() };
        Self {
            seats,
            book: Arc::new(Mutex::new(book)),
            dice: Dice::new(seed),
            mount: mount.to_owned(),
            top: String::new(),
            pauses: 0,
            figures: BTreeMap::new(),
        }
    }

    pub(crate) const fn seats() -> usize {
        KINDS.len()
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("nobody panics with the book in hand")
    }

    pub(crate) fn shared_book(&self) -> Arc<Mutex<Book>> {
        Arc::clone(&self.book)
    }

    /// Begins a life of the node, in which every trainer works in a new folder.
    pub(crate) fn begin(&mut self, top: String, pages: &Path) {
        self.top = top;
        for seat in &mut self.seats {
            seat.dead_folders.clear();
        }
        self.fill(pages);
    }

    /// Starts a trainer at each empty place, in a folder of its own.
    pub(crate) fn fill(&mut self, pages: &Path) {
        for number in 0..self.seats.len() {
            if self.seats[number].running.is_some() {
                continue;
            }
            let seed = self.dice.roll();
            let seat = &mut self.seats[number];
            seat.lives += 1;
            seat.folder = format!("{}/{}-{number}/life-{}", self.top, seat.kind, seat.lives);
            let path = pages.join(format!("{number}-{}", seat.lives));
            seat.page = Page::create(&path).expect("a page");
            let mut command = Command::new(env!("CARGO_BIN_EXE_tidemark-trainer"));
            command.arg(seat.kind).arg(&self.mount).arg(&seat.folder).arg(&path).arg(seed.to_string());
            let mut child = command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap_or_else(|error| panic!("cannot start a trainer: {error}"));
            let stdout = child.stdout.take().expect("it was piped");
            let book = Arc::clone(&self.book);
            let reader = std::thread::spawn(move || listen(number, stdout, &book));
            seat.running = Some((child, reader));
        }
    }

    /// Returns the current call of each trainer.
    pub(crate) fn doing(&self) -> impl Iterator<Item = Option<Doing>> {
        self.seats.iter().map(|seat| seat.page.doing())
    }

    /// Sends SIGKILL to a trainer and returns its current call. If the trainer waits for an answer of the daemon, it ends
    /// only after that answer, so [`Self::bury`] waits for its end.
    pub(crate) fn strike(&mut self, number: usize) -> Option<Doing> {
        let seat = &mut self.seats[number];
        let (child, _) = seat.running.as_mut()?;
        let doing = seat.page.doing();
        child.kill().expect("killing a child of ours");
        doing
    }

    /// Waits until a trainer that was struck has ended and all its events are in the book.
    pub(crate) fn bury(&mut self, number: usize) {
        let Some((mut child, reader)) = self.seats[number].running.take() else { return };
        let ended = process::wait(&mut child, PAUSE_LIMIT).expect("waiting for a child of ours");
        let (kind, doing) = (self.seats[number].kind, self.seats[number].page.doing());
        assert!(ended.is_some(), "a killed trainer ({kind}) does not end; it is inside of {doing:?}");
        reader.join().expect("the reader ends with its trainer");
        self.ended(number);
    }

    pub(crate) fn kill_all(&mut self) {
        for number in 0..self.seats.len() {
            self.strike(number);
        }
        for number in 0..self.seats.len() {
            self.bury(number);
        }
    }

    /// Makes every trainer end its round and exit, and waits for that.
    pub(crate) fn end_all(&mut self) {
        self.ask(Asked::End);
        for number in 0..self.seats.len() {
            if let Some((mut child, reader)) = self.seats[number].running.take() {
                let ended = process::wait(&mut child, PAUSE_LIMIT).expect("waiting for a child of ours");
                let doing = self.seats[number].page.doing();
                if ended.is_none() {
                    child.kill().expect("killing a child of ours");
                    child.wait().expect("reaping a child of ours");
                }
                reader.join().expect("the reader ends with its trainer");
                self.ended(number);
                let kind = self.seats[number].kind;
                assert!(ended.is_some(), "a trainer ({kind}) does not end; it is inside of {doing:?}");
            }
        }
    }

    fn ended(&mut self, number: usize) {
        let seat = &mut self.seats[number];
        seat.dead_folders.push(std::mem::take(&mut seat.folder));
        for act in Act::ALL {
            let (life, all) = (seat.page.figures(act), self.figures.entry(act).or_default());
            all.count += life.count;
            all.longest = all.longest.max(life.longest);
        }
    }

    /// Pauses all trainers, and waits until each reports that it has no file open and makes no call.
    pub(crate) fn pause(&mut self) -> Result<(), String> {
        self.pauses += 1;
        let number = self.pauses;
        self.ask(Asked::Pause(number));
        let all = process::until(PAUSE_LIMIT, || {
            let failed = self.failures_before(u64::MAX);
            if failed.is_err() {
                return Some(failed);
            }
            let book = self.book();
            let mut running = (0..self.seats.len()).filter(|seat| self.seats[*seat].running.is_some());
            running.all(|seat| book.paused[seat] == number).then_some(Ok(()))
        });
        all.unwrap_or_else(|| {
            let doing: Vec<_> = self.seats.iter().map(|seat| (seat.kind, seat.page.doing())).collect();
            Err(format!("not all trainers paused within {} s: {doing:?}", PAUSE_LIMIT.as_secs()))
        })
    }

    pub(crate) fn go_on(&self) {
        self.ask(Asked::GoOn);
    }

    fn ask(&self, asked: Asked) {
        for seat in &self.seats {
            seat.page.ask(asked);
        }
    }

    /// Fails if system calls failed before a moment. Later failures are excused and forgotten.
    pub(crate) fn failures_before(&self, before_ns: u64) -> Result<(), String> {
        let failures = std::mem::take(&mut self.book().failures);
        let bad: Vec<String> = failures
            .into_iter()
            .filter(|failure| failure.at_ns < before_ns)
            .map(|failure| failure.what)
            .collect();
        if bad.is_empty() {
            Ok(())
        } else {
            Err(format!("calls of trainers failed:\n  {}", bad.join("\n  ")))
        }
    }

    /// Returns the folders of trainers long dead, which may be removed now.
    pub(crate) fn outdated_folders(&mut self) -> Vec<String> {
        let mut outdated = vec![];
        for seat in &mut self.seats {
            let extra = seat.dead_folders.len().saturating_sub(DEAD_FOLDERS_KEPT);
            outdated.extend(seat.dead_folders.drain(..extra));
        }
        outdated
    }

    /// Returns the figures of the trainers that have ended.
    pub(crate) fn figures(&self) -> &BTreeMap<Act, ActFigures> {
        &self.figures
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for (child, _) in self.seats.iter_mut().filter_map(|seat| seat.running.as_mut()) {
            drop(child.kill());
        }
        // A trainer that waits for a daemon that does not answer ends only with the mount, which is dropped later.
        for (child, _) in self.seats.iter_mut().filter_map(|seat| seat.running.as_mut()) {
            drop(process::wait(child, LEFT_LIMIT));
        }
    }
}

fn listen(seat: usize, stdout: ChildStdout, book: &Mutex<Book>) {
    for line in BufReader::new(stdout).lines() {
        let event = line.map_err(|error| error.to_string()).and_then(|line| {
            serde_json::from_str(&line).map_err(|error| format!("a trainer said `{line}`: {error}"))
        });
        let mut book = book.lock().expect("nobody panics with the book in hand");
        match event {
            Ok(Event::Paused { number }) => book.paused[seat] = number,
            Ok(Event::Failed { act, path, what, at_ns }) => {
                book.failures.push(Failure { at_ns, what: format!("{act} {path}: {what}") });
            }
            Ok(event) => book.claims.apply(event),
            Err(what) => book.failures.push(Failure { at_ns: 0, what }),
        }
    }
}
