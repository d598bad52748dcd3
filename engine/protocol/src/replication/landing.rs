//! The partner's side: one file of one home comes together here until it is a copy.
//!
//! Owns: which chunks are known to be here and with which checksums, when they must be hashed again, and the answers. Does not own:
//! the bytes, memory and tokens (the caller carries out [`LandingCommand`]s and reports the results), small files and proofs, which
//! are whole in one message.
//!
//! A checksum here is always of bytes that lie here, never one from a message. Bytes may be hashed only while no push can write them.
//! If a push was cut off, its last pieces may still be on their way. Then everything is hashed once more, after that has ended, before
//! the file is kept.

use super::message::{Answer, BulkToken, Holder, Need, SealedCopy};
use crate::checksum::Crc64;
use crate::id::{FileId, SealNumber};
use crate::layout::chunk_count;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time for which a half-received file is kept for a silent home. The time is longer than a switch or a daemon takes to come back, and
/// shorter than memory can be spared for a home that never does.
pub const LANDING_KEPT: Duration = Duration::from_secs(600);

/// An event for a landing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandingEvent {
    /// A request of the home; see the requests of the same names.
    Begin {
        until_bytes: u64,
        sealed: Option<(SealNumber, u64, Crc64)>,
        differs: bool,
    },
    Landed {
        chunks: Vec<(u64, Crc64)>,
        until_bytes: u64,
    },
    Keep(Box<SealedCopy>),
    /// Answers [`LandingCommand::LookUp`]. `copy`: there is a copy of that seal. `alike`: there is another file of that size and
    /// checksum.
    Found {
        copy: bool,
        alike: bool,
    },
    /// Answers [`LandingCommand::Settle`]. `touched`: chunks whose bytes have landed since the last time, or have begun to. A push
    /// that broke off after its first byte counts as well, because `touched` is noted before bytes are written. `quiet`: no push can
    /// write any more.
    Settled {
        touched: Vec<u64>,
        quiet: bool,
    },
    /// Answers [`LandingCommand::Hash`]; a chunk that cannot be read whole is left out.
    Hashed(Vec<(u64, Crc64)>),
    /// Answers [`LandingCommand::Grant`].
    Granted(BulkToken),
    /// Answers [`LandingCommand::Grant`] or [`LandingCommand::Keep`].
    NoRoom {
        wanted_bytes: u64,
        free_bytes: u64,
    },
    /// Answers [`LandingCommand::Keep`]; false: the bytes could not be kept, and are gone.
    Kept(bool),
}

/// An action for the caller. Nothing else is asked of this landing until the last of them is an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandingCommand {
    LookUp {
        seal: SealNumber,
        size_bytes: u64,
        crc: Crc64,
    },
    /// Withdraw permission to write, and report whether all writes have ended.
    Settle,
    /// Hash these chunks of a file of `size_bytes` (or whole chunks), as they lie here.
    Hash {
        chunks: Vec<u64>,
        size_bytes: Option<u64>,
    },
    /// Make room up to `until_bytes`, and grant permission to write.
    Grant {
        until_bytes: u64,
    },
    /// Keep the file: it is whole and verified.
    Keep,
    Answer(Answer),
}

/// The request that is being answered.
#[derive(Debug)]
enum Asked {
    Begin { until_bytes: u64 },
    Landed { chunks: Vec<(u64, Crc64)>, until_bytes: u64, bad: Vec<u64> },
    Keep { copy: Box<SealedCopy>, need: Vec<u64> },
}

/// A file of one home, on its way in.
#[derive(Debug)]
pub struct Landing {
    file: FileId,
    holder: Holder,
    /// Whether permission to write was granted since the file was last kept.
    open: bool,
    sums: BTreeMap<u64, Crc64>,
    /// Chunks whose bytes changed since they were hashed.
    unhashed: BTreeSet<u64>,
    /// Whether a push could write while something was hashed.
    doubtful: bool,
    asked: Option<Asked>,
    /// The seal and `differs` of the request that a look-up was made for.
    sealed: Option<(SealNumber, bool)>,
    heard_at: Duration,
}

impl Landing {
    #[must_use]
    pub fn new(file: FileId, holder: Holder, now: Duration) -> Self {
        Self {
            file,
            holder,
            open: false,
            sums: BTreeMap::new(),
            unhashed: BTreeSet::new(),
            doubtful: false,
            asked: None,
            sealed: None,
            heard_at: now,
        }
    }

    #[must_use]
    pub fn file(&self) -> FileId {
        self.file
    }

    /// Whether the home has been silent for so long that the memory is worth more.
    #[must_use]
    pub fn is_stale(&self, now: Duration) -> bool {
        now.saturating_sub(self.heard_at) >= LANDING_KEPT
    }

    /// Whether bytes may lie here.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Applies one event. A request replaces the one that was being answered: its home no longer waits for that.
    pub fn step(&mut self, event: LandingEvent, now: Duration) -> Vec<LandingCommand> {
        use LandingCommand as Do;
        match event {
            LandingEvent::Begin { until_bytes, sealed, differs } => {
                self.heard_at = now;
                self.asked = Some(Asked::Begin { until_bytes });
                self.sealed = sealed.map(|(seal, ..)| (seal, differs));
                vec![match sealed {
                    Some((seal, size_bytes, crc)) => Do::LookUp { seal, size_bytes, crc },
                    None if self.open => Do::Settle,
                    None => Do::Grant { until_bytes },
                }]
            }
            LandingEvent::Landed { chunks, until_bytes } => {
                self.heard_at = now;
                if !self.open {
                    return vec![Do::Answer(Answer::Unknown)];
                }
                self.asked = Some(Asked::Landed { chunks, until_bytes, bad: Vec::new() });
                vec![Do::Settle]
            }
            LandingEvent::Keep(copy) => {
                self.heard_at = now;
                self.sealed = Some((copy.seal, true));
                let look_up = Do::LookUp { seal: copy.seal, size_bytes: copy.size_bytes, crc: copy.crc };
                self.asked = Some(Asked::Keep { copy, need: Vec::new() });
                vec![look_up]
            }
            LandingEvent::Found { copy, alike } => self.found(copy, alike),
            LandingEvent::Settled { touched, quiet } => self.settled(touched, quiet),
            LandingEvent::Hashed(sums) => self.hashed(sums),
            LandingEvent::Granted(token) => self.granted(token),
            LandingEvent::NoRoom { wanted_bytes, free_bytes } => {
                self.asked = None;
                vec![Do::Answer(Answer::NoRoom { wanted_bytes, free_bytes })]
            }
            LandingEvent::Kept(kept) => self.kept(kept),
        }
    }

    fn found(&mut self, copy: bool, alike: bool) -> Vec<LandingCommand> {
        let (Some(asked), Some((seal, differs))) = (&self.asked, self.sealed) else { return Vec::new() };
        if copy {
            self.asked = None;
            return vec![self.acknowledge(seal)];
        }
        vec![match asked {
            Asked::Begin { .. } if alike && !differs && !self.open => LandingCommand::Answer(Answer::Alike),
            Asked::Begin { until_bytes } if !self.open => LandingCommand::Grant { until_bytes: *until_bytes },
            Asked::Keep { .. } if !self.open => LandingCommand::Answer(Answer::Unknown),
            Asked::Begin { .. } | Asked::Landed { .. } | Asked::Keep { .. } => LandingCommand::Settle,
        }]
    }

    fn settled(&mut self, touched: Vec<u64>, quiet: bool) -> Vec<LandingCommand> {
        for chunk in &touched {
            self.sums.remove(chunk);
        }
        self.unhashed.extend(touched);
        self.doubtful |= !quiet;
        let unhashed = || self.unhashed.iter().copied().collect();
        vec![match &self.asked {
            None => return Vec::new(),
            Some(Asked::Begin { .. } | Asked::Landed { .. }) => {
                LandingCommand::Hash { chunks: unhashed(), size_bytes: None }
            }
            Some(Asked::Keep { .. }) if !quiet => LandingCommand::Answer(Answer::Moving),
            Some(Asked::Keep { copy, .. }) => {
                let all = self.sums.keys().chain(&self.unhashed).copied().collect::<BTreeSet<u64>>();
                let last = chunk_count(copy.size_bytes);
                // If the last chunk of a growing file was hashed, it was shorter then.
                let again = |chunk: &u64| self.doubtful || self.unhashed.contains(chunk) || chunk + 1 == last;
                let chunks = all.into_iter().filter(|chunk| *chunk < last && again(chunk)).collect();
                LandingCommand::Hash { chunks, size_bytes: Some(copy.size_bytes) }
            }
        }]
    }

    fn hashed(&mut self, sums: Vec<(u64, Crc64)>) -> Vec<LandingCommand> {
        for (chunk, sum) in sums {
            self.unhashed.remove(&chunk);
            self.sums.insert(chunk, sum);
        }
        vec![match &mut self.asked {
            None => return Vec::new(),
            Some(Asked::Begin { until_bytes }) => LandingCommand::Grant { until_bytes: *until_bytes },
            Some(Asked::Landed { chunks, until_bytes, bad }) => {
                let differ = chunks.iter().filter(|(chunk, sum)| self.sums.get(chunk) != Some(sum));
                bad.extend(differ.map(|(chunk, _)| *chunk));
                LandingCommand::Grant { until_bytes: *until_bytes }
            }
            Some(Asked::Keep { copy, need }) => {
                let differ =
                    (0..).zip(&copy.chunks).filter(|(chunk, sum)| self.sums.get(chunk) != Some(*sum));
                need.extend(differ.map(|(chunk, _)| chunk));
                if need.is_empty() {
                    LandingCommand::Keep
                } else {
                    LandingCommand::Grant { until_bytes: copy.size_bytes }
                }
            }
        }]
    }

    fn granted(&mut self, token: BulkToken) -> Vec<LandingCommand> {
        let Some(asked) = self.asked.take() else { return Vec::new() };
        self.open = true;
        let answer = match asked {
            Asked::Begin { .. } => {
                Answer::Ready { have: self.sums.iter().map(|(chunk, sum)| (*chunk, *sum)).collect(), token }
            }
            Asked::Landed { bad, .. } => Answer::Checked(Need { chunks: bad, token }),
            Asked::Keep { need, .. } => Answer::Needs(Need { chunks: need, token }),
        };
        vec![LandingCommand::Answer(answer)]
    }

    fn kept(&mut self, kept: bool) -> Vec<LandingCommand> {
        let Some(Asked::Keep { copy, .. }) = self.asked.take() else { return Vec::new() };
        self.open = false;
        self.sums.clear();
        self.unhashed.clear();
        self.doubtful = false;
        vec![if kept { self.acknowledge(copy.seal) } else { LandingCommand::Answer(Answer::Unknown) }]
    }

    fn acknowledge(&self, seal: SealNumber) -> LandingCommand {
        LandingCommand::Answer(Answer::Acknowledged { file: self.file, seal, by: self.holder })
    }
}
