//! System calls of a trainer. Each is shown on the trainer's page, and a failure is reported to the auditor.
//!
//! Owns: the order of events: `will` before the first call that changes a name, `is` after the last one returned.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::campaign::event::{By, Bytes, Event, Holds};
use tidemark_tests::campaign::now_ns;
use tidemark_tests::campaign::page::{Act, Page};

use crate::calls;

/// A failure after which the trainer ends. The auditor has its report, or has died.
#[derive(Debug)]
pub(crate) struct Stop;

/// State of a trainer besides its way of saving.
pub(crate) struct Trainer {
    pub(crate) page: Page,
    pub(crate) dice: Dice,
    /// Rounds so far.
    pub(crate) round: u64,
    /// Content written so far to the logs of the kind `append`.
    pub(crate) logs: Vec<Vec<u8>>,
    mount: PathBuf,
    folder: String,
}

impl Trainer {
    pub(crate) fn new(page: Page, mount: PathBuf, folder: String, seed: u64) -> Self {
        Self { page, dice: Dice::new(seed), round: 0, logs: vec![], mount, folder }
    }

    /// Returns the path of a name in the trainer's folder, as the auditor calls it.
    pub(crate) fn name(&self, name: &str) -> String {
        if name.is_empty() { self.folder.clone() } else { format!("{}/{name}", self.folder) }
    }

    fn place(&self, name: &str) -> PathBuf {
        self.mount.join(self.name(name))
    }

    /// Makes a call and shows it on the page. If the call fails, reports that to the auditor.
    pub(crate) fn act<T>(
        &self,
        act: Act,
        name: &str,
        call: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, Stop> {
        let result = self.page.during(act, call);
        result.or_else(|error| {
            self.tell(&Event::Failed {
                act: format!("{act:?}").to_lowercase(),
                path: self.name(name),
                what: error.to_string(),
                at_ns: now_ns(),
            })?;
            Err(Stop)
        })
    }

    /// Prints an event in one write, so that a killed trainer leaves no half line.
    pub(crate) fn tell(&self, event: &Event) -> Result<(), Stop> {
        rustix::io::write(rustix::stdio::stdout(), event.line().as_bytes()).map(drop).map_err(|_| Stop)
    }

    pub(crate) fn will(&self, name: &str, to: Option<Holds>) -> Result<(), Stop> {
        self.tell(&Event::Will { path: self.name(name), to })
    }

    pub(crate) fn is(&self, name: &str, holds: Holds, by: By) -> Result<(), Stop> {
        self.tell(&Event::Is { path: self.name(name), holds, by })
    }

    pub(crate) fn folders(&self, name: &str) -> Result<(), Stop> {
        self.act(Act::Mkdir, name, || fs::create_dir_all(self.place(name)))
    }

    /// Calls mkdir(2), which must make the directory. EEXIST would mean that the request was executed twice.
    pub(crate) fn folder(&self, name: &str) -> Result<(), Stop> {
        self.act(Act::Mkdir, name, || fs::create_dir(self.place(name)))
    }

    pub(crate) fn open(&self, name: &str, options: &OpenOptions) -> Result<File, Stop> {
        self.act(Act::Open, name, || options.open(self.place(name)))
    }

    pub(crate) fn write(&self, name: &str, file: &mut File, bytes: &[u8]) -> Result<(), Stop> {
        self.act(Act::Write, name, || file.write_all(bytes))
    }

    /// Reports the content that the file will have, closes the file, and only then promises that content.
    pub(crate) fn close(&self, name: &str, file: File, holds: &[u8]) -> Result<(), Stop> {
        let holds = Holds::Whole(Bytes::of(holds));
        self.will(name, Some(holds.clone()))?;
        self.act(Act::Close, name, || calls::close(file))?;
        self.is(name, holds, By::Close)
    }

    /// Syncs the file, and only then promises the content so far.
    pub(crate) fn fsync(&self, name: &str, file: &File, so_far: &[u8]) -> Result<(), Stop> {
        self.act(Act::Fsync, name, || file.sync_all())?;
        self.is(name, Holds::Begins(Bytes::of(so_far)), By::Fsync)
    }

    pub(crate) fn stat(&self, name: &str, size_bytes: usize) -> Result<(), Stop> {
        let metadata = self.act(Act::Stat, name, || fs::metadata(self.place(name)))?;
        self.believe(name, metadata.len() == size_bytes as u64, || {
            format!("{} bytes are shown, {size_bytes} were written", metadata.len())
        })
    }

    pub(crate) fn unlink(&self, name: &str) -> Result<(), Stop> {
        self.will(name, Some(Holds::Absent))?;
        self.act(Act::Unlink, name, || fs::remove_file(self.place(name)))?;
        self.is(name, Holds::Absent, By::Unlink)
    }

    /// Removes a folder without a `will` before it, because a folder's absence is the only promise about it.
    pub(crate) fn remove_folder(&self, name: &str) -> Result<(), Stop> {
        self.act(Act::Unlink, name, || fs::remove_dir(self.place(name)))?;
        self.is(name, Holds::Absent, By::Unlink)
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), Stop> {
        let (old, new) = (self.name(from), self.name(to));
        self.tell(&Event::WillMove { from: old.clone(), to: new.clone() })?;
        self.act(Act::Rename, from, || fs::rename(self.place(from), self.place(to)))?;
        self.tell(&Event::Moved { from: old, to: new })
    }

    /// Reports a wrong answer of a read or a stat like a failure.
    pub(crate) fn believe(&self, name: &str, true_: bool, what: impl FnOnce() -> String) -> Result<(), Stop> {
        if true_ { Ok(()) } else { self.act(Act::Stat, name, || Err(io::Error::other(what()))) }
    }
}
