//! The home's side: one file on its way to one partner.
//!
//! Owns: what is sent next, what the partner is known to have, when to ask again and the reason for a wait. Does not own: the
//! bytes, their hashes and the link (the caller carries out [`SenderCommand`]s), which file goes first (`order`).
//!
//! A single operation is under way at a time, under a number; an answer with another number is late and changes nothing. After
//! any failure the sender begins with a question: chunks that the partner then reports are not sent again.

use super::message::{Answer, BulkToken, Holder, SMALL_BYTES};
use crate::checksum::Crc64;
use crate::file::Seal;
use crate::id::{ContentHash, FileId, SealNumber};
use crate::layout::{CHUNK_BYTES, chunk_count};
use std::collections::BTreeMap;
use std::time::Duration;

/// Chunks of one push: 128 MiB. More urgent work waits for no more than that, and the question between two pushes costs a
/// thousandth of it.
pub const BATCH_CHUNKS_MAX: usize = 16;

/// Pause before a retry: doubled from the first to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(10);
/// The same if the partner has no room: its memory comes back as its own files drain, which takes seconds.
const ROOM_FIRST: Duration = Duration::from_millis(200);

/// An event for a sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderEvent {
    /// Whole chunks below this offset are probably final, although the file is still written.
    Grew {
        stable_bytes: u64,
    },
    Sealed(Seal),
    /// The file is written again: the seal is no more.
    Changed,
    Answered {
        op: u64,
        answer: Answer,
    },
    /// Every byte of the push is in the partner's file; `sums` are the checksums of the bytes sent.
    Pushed {
        op: u64,
        sums: Vec<(u64, Crc64)>,
    },
    /// The hash that [`SenderCommand::Hash`] asked for.
    Hashed {
        op: u64,
        hash: ContentHash,
    },
    /// The operation failed, and may have been done or not.
    Failed {
        op: u64,
        why: String,
    },
    /// The partner's memory is a new life, or the partner reported that it no longer holds a copy.
    Forgotten,
    /// Time has passed.
    Tick,
}

/// A question to the partner, without the facts that only the caller knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    Begin { until_bytes: u64, sealed: Option<(SealNumber, u64, Crc64)>, differs: bool },
    Landed { chunks: Vec<(u64, Crc64)>, until_bytes: u64 },
    Keep(SealNumber),
    Small(SealNumber),
    Prove(SealNumber, ContentHash),
}

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderCommand {
    Call {
        op: u64,
        ask: Ask,
    },
    /// Send these chunks, and report their checksums.
    Push {
        op: u64,
        token: BulkToken,
        chunks: Vec<u64>,
    },
    /// Compute BLAKE3 of the sealed bytes.
    Hash {
        op: u64,
    },
    /// The partner has the file. Issued once for each copy that was not known before.
    Acknowledged {
        seal: SealNumber,
        by: Holder,
    },
    /// Nothing is to be done before that moment.
    Wake {
        at: Duration,
    },
}

/// The bytes to send.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Goal {
    Growing { stable_bytes: u64 },
    Sealed(Seal),
}

/// The operation under way.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Doing {
    Asking(Ask),
    Pushing,
    Hashing,
}

/// Whether the partner may have the same bytes under another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alike {
    Unasked,
    /// The partner claims so; the hash has to be computed.
    Claimed,
    Proven(ContentHash),
    Refuted,
}

/// A file on its way to one partner.
#[derive(Debug)]
pub struct Sender {
    file: FileId,
    goal: Goal,
    /// Chunks that the partner has reported.
    there: BTreeMap<u64, Crc64>,
    /// Chunks sent since, and not yet reported to the partner.
    unspoken: Vec<(u64, Crc64)>,
    token: Option<BulkToken>,
    alike: Alike,
    doing: Option<(u64, Doing)>,
    next_op: u64,
    failures: u32,
    waits: Option<(Duration, String)>,
    acknowledged: Option<(SealNumber, Holder)>,
}

impl Sender {
    #[must_use]
    pub fn new(file: FileId) -> Self {
        Self {
            file,
            goal: Goal::Growing { stable_bytes: 0 },
            there: BTreeMap::new(),
            unspoken: Vec::new(),
            token: None,
            alike: Alike::Unasked,
            doing: None,
            next_op: 1,
            failures: 0,
            waits: None,
            acknowledged: None,
        }
    }

    #[must_use]
    pub fn file(&self) -> FileId {
        self.file
    }

    /// Returns the copy that the partner has of the present seal.
    #[must_use]
    pub fn acknowledged(&self) -> Option<(SealNumber, Holder)> {
        let Goal::Sealed(seal) = &self.goal else { return None };
        self.acknowledged.filter(|(number, _)| *number == seal.number)
    }

    /// Returns why the sender waits; none while it works or has nothing to do.
    #[must_use]
    pub fn waits_for(&self) -> Option<&str> {
        self.waits.as_ref().map(|(_, why)| why.as_str())
    }

    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.doing.is_some()
    }

    /// Returns how many bytes the partner lacks, as far as is known.
    #[must_use]
    pub fn lacking_bytes(&self) -> u64 {
        if self.acknowledged().is_some() {
            return 0;
        }
        let size_bytes = match &self.goal {
            Goal::Growing { stable_bytes } => *stable_bytes / CHUNK_BYTES * CHUNK_BYTES,
            Goal::Sealed(seal) => seal.size_bytes,
        };
        let lacking = self.lacking(usize::MAX).len() as u64;
        lacking.saturating_mul(CHUNK_BYTES).min(size_bytes)
    }

    /// Applies one event, and appends the actions to `todo`. Costs a pass over the file's chunks.
    pub fn step(&mut self, event: SenderEvent, now: Duration, todo: &mut Vec<SenderCommand>) {
        match event {
            SenderEvent::Grew { stable_bytes } => {
                if let Goal::Growing { stable_bytes: known } = &mut self.goal {
                    *known = stable_bytes;
                }
            }
            SenderEvent::Sealed(seal) => {
                let known = matches!(&self.goal, Goal::Sealed(now) if now.number == seal.number);
                if !known {
                    self.goal = Goal::Sealed(seal);
                    self.alike = if self.there.is_empty() { Alike::Unasked } else { Alike::Refuted };
                }
            }
            SenderEvent::Changed => {
                if matches!(self.goal, Goal::Sealed(_)) {
                    self.goal = Goal::Growing { stable_bytes: 0 };
                    self.alike = Alike::Unasked;
                }
            }
            SenderEvent::Forgotten => {
                self.acknowledged = None;
                self.forget();
            }
            SenderEvent::Answered { op, answer } => {
                if let Some(Doing::Asking(ask)) = self.ended(op) {
                    self.answered(&ask, answer, now, todo);
                }
            }
            SenderEvent::Pushed { op, sums } => {
                if self.ended(op).is_some() {
                    self.token = None;
                    self.unspoken.extend(sums);
                }
            }
            SenderEvent::Hashed { op, hash } => {
                if self.ended(op).is_some() && self.alike == Alike::Claimed {
                    self.alike = Alike::Proven(hash);
                }
            }
            SenderEvent::Failed { op, why } => {
                if self.ended(op).is_some() {
                    self.forget();
                    self.wait(now, RETRY_FIRST, why);
                }
            }
            SenderEvent::Tick => {}
        }
        self.advance(now, todo);
    }

    fn ended(&mut self, op: u64) -> Option<Doing> {
        self.doing.take_if(|(number, _)| *number == op).map(|(_, doing)| doing)
    }

    /// Forgets what the partner has: the next operation is a question.
    fn forget(&mut self) {
        self.there.clear();
        self.unspoken.clear();
        self.token = None;
    }

    fn wait(&mut self, now: Duration, first: Duration, why: String) {
        let pause = first.saturating_mul(1 << self.failures.min(10)).min(RETRY_MOST);
        self.failures = self.failures.saturating_add(1);
        self.waits = Some((now + pause, why));
    }

    fn answered(&mut self, ask: &Ask, answer: Answer, now: Duration, todo: &mut Vec<SenderCommand>) {
        match answer {
            Answer::Ready { have, token } => {
                self.there = have.into_iter().collect();
                self.unspoken.clear();
                self.token = Some(token);
            }
            Answer::Alike if self.alike == Alike::Unasked => self.alike = Alike::Claimed,
            Answer::Alike | Answer::Differs => self.alike = Alike::Refuted,
            Answer::Checked(need) => {
                if let Ask::Landed { chunks, .. } = ask {
                    self.there.extend(chunks.iter().copied());
                }
                self.refused(&need.chunks, "did not arrive as they were sent", now);
                self.token = Some(need.token);
            }
            Answer::Needs(need) if need.chunks.is_empty() => {
                self.strange(now, "it needs nothing, and has no copy")
            }
            Answer::Needs(need) => {
                // An unreported chunk either is there with the seal's checksum, or is among the needed ones.
                if let Goal::Sealed(seal) = &self.goal {
                    self.there = (0..).zip(seal.chunks.iter().copied()).collect();
                }
                self.refused(&need.chunks, "are not what was sealed", now);
                self.token = Some(need.token);
            }
            Answer::Acknowledged { file, seal, by } => {
                let asked = matches!(ask, Ask::Keep(number) | Ask::Small(number) | Ask::Prove(number, _)
                    | Ask::Begin { sealed: Some((number, ..)), .. } if *number == seal);
                if file != self.file || !asked {
                    return self.strange(now, "it acknowledged what was not asked");
                }
                self.forget();
                self.failures = 0;
                self.waits = None;
                if self.acknowledged != Some((seal, by)) {
                    self.acknowledged = Some((seal, by));
                    todo.push(SenderCommand::Acknowledged { seal, by });
                }
            }
            Answer::Unknown => {
                self.forget();
                self.wait(now, RETRY_FIRST, "it does not know what was begun any more".to_owned());
            }
            Answer::Moving => {
                self.wait(now, RETRY_FIRST, "bytes of an earlier try may still be on their way".to_owned());
            }
            Answer::NoRoom { wanted_bytes, free_bytes } => {
                self.token = None;
                let why = format!("its memory has no room: {wanted_bytes} bytes wanted, {free_bytes} free");
                self.wait(now, ROOM_FIRST, why);
            }
            Answer::Granted { .. } | Answer::NotHere | Answer::Coming | Answer::Busy | Answer::Noted => {
                self.strange(now, "it answered another question");
            }
        }
    }

    fn strange(&mut self, now: Duration, why: &str) {
        self.forget();
        self.wait(now, RETRY_FIRST, why.to_owned());
    }

    /// Records chunks that the partner lacks. If bytes repeatedly arrive wrong, the retries become ever rarer.
    fn refused(&mut self, chunks: &[u64], how: &str, now: Duration) {
        self.unspoken.clear();
        for chunk in chunks {
            self.there.remove(chunk);
        }
        match chunks.first() {
            Some(first) => {
                self.wait(now, RETRY_FIRST, format!("{} chunks, the first is {first}, {how}", chunks.len()))
            }
            None => {
                self.failures = 0;
                self.waits = None;
            }
        }
    }

    /// Returns the chunks to send, at most `most`, in order.
    fn lacking(&self, most: usize) -> Vec<u64> {
        let sent = |chunk: &u64| {
            let spoken = self.unspoken.iter().rev().find(|(sent, _)| sent == chunk).map(|(_, sum)| *sum);
            spoken.or_else(|| self.there.get(chunk).copied())
        };
        match &self.goal {
            Goal::Growing { stable_bytes } => {
                (0..stable_bytes / CHUNK_BYTES).filter(|chunk| sent(chunk).is_none()).take(most).collect()
            }
            Goal::Sealed(seal) => {
                let chunks = (0..).zip(seal.chunks.iter());
                chunks
                    .filter(|(chunk, sum)| sent(chunk) != Some(**sum))
                    .map(|(chunk, _)| chunk)
                    .take(most)
                    .collect()
            }
        }
    }

    fn advance(&mut self, now: Duration, todo: &mut Vec<SenderCommand>) {
        if self.doing.is_some() || self.acknowledged().is_some() {
            return;
        }
        if let Some((at, _)) = &self.waits {
            if now < *at {
                todo.push(SenderCommand::Wake { at: *at });
                return;
            }
            self.waits = None;
        }
        let lacking = self.lacking(BATCH_CHUNKS_MAX);
        let sealed = match &self.goal {
            Goal::Growing { .. } => None,
            Goal::Sealed(seal) => Some((seal.number, seal.size_bytes, seal.crc)),
        };
        let until_bytes = |chunks: &[u64]| {
            let end = chunks.last().map_or(0, |last| (last + 1) * CHUNK_BYTES);
            sealed.map_or(end, |(_, size_bytes, _)| size_bytes)
        };
        let Some((number, size_bytes, _)) = sealed else {
            if lacking.is_empty() {
                return;
            }
            return match self.token {
                Some(token) => self.push(token, lacking, todo),
                // Once a batch is whole: a question for each chunk would be one for every few milliseconds.
                None if self.unspoken.is_empty() => {
                    let until_bytes = until_bytes(&lacking);
                    self.ask(Ask::Begin { until_bytes, sealed: None, differs: false }, todo);
                }
                None => self.speak(until_bytes(&lacking), todo),
            };
        };
        // After a failure the sender asks first, so that a lost answer does not cause the bytes to be sent again.
        if size_bytes <= SMALL_BYTES && self.failures == 0 && self.there.is_empty() {
            return self.ask(Ask::Small(number), todo);
        }
        match self.alike {
            Alike::Claimed => return self.begin(Doing::Hashing, |op| SenderCommand::Hash { op }, todo),
            Alike::Proven(hash) => return self.ask(Ask::Prove(number, hash), todo),
            Alike::Unasked | Alike::Refuted => {}
        }
        let begun = !self.there.is_empty() || !self.unspoken.is_empty();
        match (self.token, lacking.is_empty()) {
            (Some(token), false) => self.push(token, lacking, todo),
            (Some(_), true) => self.ask(Ask::Keep(number), todo),
            (None, true) if begun && chunk_count(size_bytes) > 0 => self.ask(Ask::Keep(number), todo),
            (None, false) if !self.unspoken.is_empty() => self.speak(size_bytes, todo),
            (None, _) => {
                let differs = self.alike == Alike::Refuted;
                self.ask(Ask::Begin { until_bytes: size_bytes, sealed, differs }, todo);
            }
        }
    }

    /// Reports the chunks that were sent, and asks to go on.
    fn speak(&mut self, until_bytes: u64, todo: &mut Vec<SenderCommand>) {
        self.ask(Ask::Landed { chunks: self.unspoken.clone(), until_bytes }, todo);
    }

    fn ask(&mut self, ask: Ask, todo: &mut Vec<SenderCommand>) {
        self.begin(Doing::Asking(ask.clone()), |op| SenderCommand::Call { op, ask }, todo);
    }

    fn push(&mut self, token: BulkToken, chunks: Vec<u64>, todo: &mut Vec<SenderCommand>) {
        self.begin(Doing::Pushing, |op| SenderCommand::Push { op, token, chunks }, todo);
    }

    fn begin(
        &mut self,
        doing: Doing,
        command: impl FnOnce(u64) -> SenderCommand,
        todo: &mut Vec<SenderCommand>,
    ) {
        let op = self.next_op;
        self.next_op += 1;
        self.doing = Some((op, doing));
        todo.push(command(op));
    }
}
