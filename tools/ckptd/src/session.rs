//! State for the next daemon to go on where this one died: named descriptors with the keeper, one of them a record.
//!
//! Owns: the record and the names. Does not own: keeping (the keeper), the use of the descriptors (`base`, `up`).
//!
//! The record is handed over last: without it, the other descriptors come from a start that never served.

use crate::base::OwnMemory;
use anyhow::{Context, bail};
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use tidemark_fuse::{InitExchange, KeptMount, Mode, MountRecord};
use tidemark_keeper::{Answered, Keeper, names};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{KeptMounts, KeptSpill};

/// Raised when a field changes its meaning. A daemon refuses a newer record than it knows, and an upgrade is rolled back.
const RECORD_VERSION: u32 = 2;
/// Version of a record without a spill: an older daemon reads it, and loses nothing.
const RECORD_VERSION_WITHOUT_SPILL: u32 = 1;

/// The longest record: some hundred bytes and three paths.
const RECORD_MAX_BYTES: u64 = 64 << 10;

const JOURNAL: &str = "journal";
const FOLDER_LOCK: &str = "folder-lock";
const SPILL: &str = "spill";
const RECORD: &str = "session";

/// Everything that a start decided and its successors keep.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    pub(crate) node: String,
    pub(crate) incarnation: u64,
    pub(crate) tier1_bytes: u64,
    /// The folder of Tier-1 where it is no tmpfs of its own.
    folder: Option<Vec<u8>>,
    /// The spill's folder, where there is one.
    #[serde(default)]
    spill: Option<SavedSpill>,
    /// With the ports that were free then.
    pub(crate) listen: String,
    pub(crate) http: String,
    /// None: it could not be gone on with and is gone; the memory is there still.
    mount: Option<SavedMount>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedSpill {
    folder: Vec<u8>,
    budget_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedMount {
    path: Vec<u8>,
    passthrough: bool,
    reason: String,
    privileged: bool,
    allow_other: bool,
    init_request: Vec<u8>,
    init_answer: Vec<u8>,
}

/// A session that a daemon before this one left.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) record: Record,
    pub(crate) mounts: KeptMounts,
    pub(crate) mount: Option<KeptMount>,
    /// Answers of the keeper while no daemon was there.
    pub(crate) answered: Vec<Answered>,
}

impl Record {
    pub(crate) fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation)
    }
}

impl SavedMount {
    fn record(&self) -> MountRecord {
        MountRecord {
            path: PathBuf::from(std::ffi::OsString::from_vec(self.path.clone())),
            mode: if self.passthrough { Mode::Passthrough } else { Mode::Fallback },
            reason: self.reason.clone(),
            privileged: self.privileged,
            allow_other: self.allow_other,
            init: InitExchange { request: self.init_request.clone(), answer: self.init_answer.clone() },
        }
    }
}

/// State that a serving daemon hands over besides Tier-1.
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    pub(crate) node: &'a str,
    pub(crate) incarnation: Incarnation,
    pub(crate) tier1_bytes: u64,
    pub(crate) listen: &'a str,
    pub(crate) http: &'a str,
    pub(crate) mounted: &'a tidemark_fuse::Mounted,
    pub(crate) mounts: &'a KeptMounts,
    /// Memory that the next daemon goes on with as soon as the keeper has the record.
    pub(crate) memory: &'a OwnMemory,
}

/// Hands everything over. Memory is kept from the record on, however this ends: the keeper may have the record although its answer
/// was lost.
pub(crate) fn hand_over(keeper: &Keeper, serving: &Serving<'_>) -> anyhow::Result<()> {
    let mounts = serving.mounts;
    keeper.put(names::FILES, mounts.files.as_fd())?;
    keeper.put(names::BALLAST, mounts.ballast.as_fd())?;
    keeper.put(JOURNAL, mounts.journal.as_fd())?;
    if let Some((_, lock)) = &mounts.folder {
        keeper.put(FOLDER_LOCK, lock.as_fd())?;
    }
    if let Some(spill) = &mounts.spill {
        // The descriptor carries the lock, which shows for as long as the keeper lives that these files are in use.
        keeper.put(SPILL, spill.directory.as_fd())?;
    }
    keeper.put(names::DEVICE, serving.mounted.device())?;
    let mount = serving.mounted.record();
    let record = Record {
        version: if mounts.spill.is_some() { RECORD_VERSION } else { RECORD_VERSION_WITHOUT_SPILL },
        node: serving.node.to_owned(),
        incarnation: serving.incarnation.0,
        tier1_bytes: serving.tier1_bytes,
        folder: mounts.folder.as_ref().map(|(path, _)| path.as_os_str().as_bytes().to_vec()),
        spill: mounts.spill.as_ref().map(|spill| SavedSpill {
            folder: spill.folder.as_os_str().as_bytes().to_vec(),
            budget_bytes: spill.budget_bytes,
        }),
        listen: serving.listen.to_owned(),
        http: serving.http.to_owned(),
        mount: Some(SavedMount {
            path: mount.path.as_os_str().as_bytes().to_vec(),
            passthrough: mount.mode == Mode::Passthrough,
            reason: mount.reason.clone(),
            privileged: mount.privileged,
            allow_other: mount.allow_other,
            init_request: mount.init.request.clone(),
            init_answer: mount.init.answer.clone(),
        }),
    };
    // Before the record: a next daemon that finds one whole finds the memory, too.
    serving.memory.keep();
    put(keeper, &record)?;
    keeper.mounted(&mount.path)?;
    Ok(())
}

fn put(keeper: &Keeper, record: &Record) -> anyhow::Result<()> {
    let memory = rustix::fs::memfd_create("tidemark-session", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    serde_json::to_writer(&mut file, record)?;
    file.flush()?;
    Ok(keeper.put(RECORD, file.as_fd())?)
}

/// Finds what an earlier daemon left. If that is incomplete, it is let go, and the result is `None`.
///
/// Errors: the record is of a newer daemon, or no record.
pub(crate) fn find(
    keeper: &Keeper,
    mut descriptors: BTreeMap<String, OwnedFd>,
) -> anyhow::Result<Option<Found>> {
    let Some(record) = descriptors.remove(RECORD) else {
        for name in descriptors.keys() {
            keeper.remove(name)?;
        }
        return Ok(None);
    };
    let record = read(File::from(record)).context("the record of the session before cannot be used")?;
    let mut take = |name: &str| {
        descriptors.remove(name).with_context(|| format!("the session before has a record and no {name:?}"))
    };
    let folder = match &record.folder {
        Some(path) => Some((PathBuf::from(std::ffi::OsString::from_vec(path.clone())), take(FOLDER_LOCK)?)),
        None => None,
    };
    let spill = match &record.spill {
        Some(saved) => Some(KeptSpill {
            folder: PathBuf::from(std::ffi::OsString::from_vec(saved.folder.clone())),
            directory: take(SPILL)?,
            budget_bytes: saved.budget_bytes,
        }),
        None => None,
    };
    let mounts = KeptMounts {
        files: take(names::FILES)?,
        ballast: take(names::BALLAST)?,
        journal: take(JOURNAL)?,
        folder,
        spill,
    };
    let mount = match &record.mount {
        Some(saved) => Some(KeptMount { device: take(names::DEVICE)?, record: saved.record() }),
        None => {
            // The device is left from a daemon that died before the mount was let go, or before it handed the next one over.
            if descriptors.remove(names::DEVICE).is_some() {
                keeper.remove(names::DEVICE)?;
            }
            None
        }
    };
    let answered = descriptors.remove(names::ANSWERED).map(Answered::read_all).transpose()?;
    Ok(Some(Found { record, mounts, mount, answered: answered.unwrap_or_default() }))
}

/// The mount cannot be gone on with: the keeper lets its device go, which ends it for good, and keeps the memory.
pub(crate) fn let_mount_go(keeper: &Keeper, mut record: Record) -> anyhow::Result<()> {
    record.mount = None;
    put(keeper, &record)?;
    keeper.remove(names::DEVICE)?;
    Ok(())
}

/// Lets everything go at the end, so that no daemon goes on with anything. The record goes first, because the rest counts for
/// nothing without it.
pub(crate) fn let_all_go(keeper: &Keeper) -> anyhow::Result<()> {
    for name in
        [RECORD, names::DEVICE, names::ANSWERED, names::FILES, names::BALLAST, JOURNAL, FOLDER_LOCK, SPILL]
    {
        keeper.remove(name)?;
    }
    Ok(())
}

fn read(mut file: File) -> anyhow::Result<Record> {
    // The position belongs to the open file, which the keeper and every daemon before share.
    file.seek(SeekFrom::Start(0))?;
    let mut text = Vec::new();
    (&file).take(RECORD_MAX_BYTES).read_to_end(&mut text)?;
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(&text).context("it is no record")?;
    if !(RECORD_VERSION_WITHOUT_SPILL..=RECORD_VERSION).contains(&version) {
        bail!("it has version {version}, this ckptd reads up to {RECORD_VERSION}: run the one that wrote it");
    }
    Ok(serde_json::from_slice(&text)?)
}
