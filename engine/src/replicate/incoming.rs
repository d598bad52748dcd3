//! A file that is coming in from its home.
//!
//! Owns: the file's memory, leave to write into it, carrying out the landing's commands. Does not own: the rules
//! (`protocol::replication`), which files are coming in (`receive`).

use super::here::Here;
use crate::chunk::bytes::{Sink, Touched, blocking, sums};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::id::FileId;
use tidemark_protocol::replication::{Answer, BulkToken, Landing, LandingCommand, LandingEvent, SealedCopy};
use tidemark_tier1::{Backing, Growing, Tier1Error};
use tidemark_transport::{Grant, Token};

/// Longest wait for the end of a confirmed push before it counts as cut: the connection's task closes the file a moment after its
/// last message.
const LETTING_GO: Duration = Duration::from_millis(200);
const LETTING_GO_LOOK: Duration = Duration::from_millis(1);

/// A landing with its memory.
#[derive(Debug)]
pub(super) struct Incoming {
    landing: Landing,
    memory: Option<Memory>,
}

#[derive(Debug)]
struct Memory {
    backing: Arc<Backing>,
    _growing: Growing,
    /// The leave to write that is in force.
    leave: Option<(Token, Arc<Sink>)>,
    /// Sinks of revoked leaves that may still be written.
    ending: Vec<Weak<Sink>>,
    touched: Touched,
}

impl Incoming {
    pub(super) fn new(file: FileId, here: &Here) -> Self {
        Self { landing: Landing::new(file, here.holder, here.now()), memory: None }
    }

    pub(super) fn is_stale(&self, now: Duration) -> bool {
        self.landing.is_stale(now)
    }

    /// Whether no part of the file is here.
    pub(super) fn is_empty(&self) -> bool {
        !self.landing.is_open()
    }

    /// Answers a request of the home `peer`.
    pub(super) async fn answer(&mut self, here: &Arc<Here>, peer: &str, event: LandingEvent) -> Answer {
        let copy = match &event {
            LandingEvent::Keep(copy) => Some(SealedCopy::clone(copy)),
            _ => None,
        };
        let mut next = Some(event);
        while let Some(event) = next.take() {
            for command in self.landing.step(event, here.now()) {
                next = Some(match command {
                    LandingCommand::Answer(answer) => return answer,
                    LandingCommand::LookUp { seal, size_bytes, crc } => {
                        here.found(self.landing.file(), seal, size_bytes, crc).await
                    }
                    LandingCommand::Settle => self.settle(here).await,
                    LandingCommand::Hash { chunks, size_bytes } => self.hash(chunks, size_bytes).await,
                    LandingCommand::Grant { until_bytes } => self.grant(here, peer, until_bytes).await,
                    LandingCommand::Keep => self.keep(here, copy.as_ref()).await,
                });
            }
        }
        Answer::Unknown
    }

    async fn settle(&mut self, here: &Here) -> LandingEvent {
        let Some(memory) = &mut self.memory else {
            return LandingEvent::Settled { touched: Vec::new(), quiet: true };
        };
        if let Some((token, sink)) = memory.leave.take() {
            here.link().revoke(token);
            memory.ending.push(Arc::downgrade(&sink));
        }
        let deadline = tokio::time::Instant::now() + LETTING_GO;
        loop {
            memory.ending.retain(|sink| sink.strong_count() > 0);
            if memory.ending.is_empty() || tokio::time::Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(LETTING_GO_LOOK).await;
        }
        let touched = memory.touched.take().into_iter().collect();
        LandingEvent::Settled { touched, quiet: memory.ending.is_empty() }
    }

    async fn hash(&self, chunks: Vec<u64>, size_bytes: Option<u64>) -> LandingEvent {
        let Some(memory) = &self.memory else { return LandingEvent::Hashed(Vec::new()) };
        let backing = Arc::clone(&memory.backing);
        let hashed = blocking(move || {
            let lying = backing.stat()?.size_bytes;
            if let Some(size_bytes) = size_bytes.filter(|size_bytes| *size_bytes < lying) {
                // The file was longer when sending began.
                backing.set_len(size_bytes).map_err(std::io::Error::other)?;
            }
            sums(&backing, &chunks, size_bytes.unwrap_or(lying))
        });
        LandingEvent::Hashed(hashed.await.unwrap_or_else(|error| {
            tracing::error!(%error, "what a home sent cannot be read");
            Vec::new()
        }))
    }

    async fn grant(&mut self, here: &Arc<Here>, peer: &str, until_bytes: u64) -> LandingEvent {
        match self.make_room(here, peer, until_bytes).await {
            Ok(token) => LandingEvent::Granted(BulkToken(token.to_bytes())),
            Err(error) => {
                let full = error.kind() == ErrorKind::NoSpace;
                if !full {
                    tracing::error!(%error, peer, "no memory can be made for a peer's copy");
                }
                let free_bytes = if full { here.tier1.usage().available_bytes } else { 0 };
                LandingEvent::NoRoom { wanted_bytes: until_bytes, free_bytes }
            }
        }
    }

    async fn make_room(
        &mut self,
        here: &Arc<Here>,
        peer: &str,
        until_bytes: u64,
    ) -> Result<Token, Tier1Error> {
        let known = self.memory.as_ref().map(|memory| Arc::clone(&memory.backing));
        let (namespace, fresh) = (Arc::clone(&here.namespace), known.is_none());
        let backing = blocking(move || match known {
            None => namespace.room().backing_for(Some(until_bytes)),
            Some(backing) => match backing.reserve(until_bytes) {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    namespace.room().make_room(until_bytes.saturating_sub(backing.held_bytes()));
                    backing.reserve(until_bytes).map(|()| backing)
                }
                reserved => reserved.map(|()| backing),
            },
        });
        let backing = backing.await?;
        if fresh {
            let (leave, ending, touched) = (None, Vec::new(), Touched::default());
            let growing = backing.growing();
            self.memory =
                Some(Memory { backing: Arc::clone(&backing), _growing: growing, leave, ending, touched });
        }
        let touched = self.memory.as_ref().map_or_else(Touched::default, |memory| memory.touched.clone());
        let sink = Sink::open(&backing, touched).map_err(|source| Tier1Error::Resize {
            step: "opening",
            number: backing.number(),
            offset_bytes: 0,
            len_bytes: until_bytes,
            source,
        })?;
        let grant = Grant::Receive { into: Arc::clone(&sink) as _, limit_bytes: until_bytes };
        let token = here.link().grant(peer, grant);
        if let Some(memory) = &mut self.memory
            && let Some((old, sink)) = memory.leave.replace((token, sink))
        {
            here.link().revoke(old);
            memory.ending.push(Arc::downgrade(&sink));
        }
        Ok(token)
    }

    async fn keep(&mut self, here: &Arc<Here>, copy: Option<&SealedCopy>) -> LandingEvent {
        let (Some(memory), Some(copy)) = (self.memory.take(), copy.cloned()) else {
            return LandingEvent::Kept(false);
        };
        let backing = Arc::clone(&memory.backing);
        drop(memory); // Growth ends, and with it the space made ready ahead.
        let (namespace, metrics) = (Arc::clone(&here.namespace), Arc::clone(&here.metrics));
        let kept = blocking(move || {
            let kept = namespace.peer_copies().keep_copy(&copy, backing);
            if kept.is_ok() {
                metrics.replica_received_bytes.inc_by(copy.size_bytes);
            }
            kept.map_err(|error| (error, copy.file))
        });
        LandingEvent::Kept(
            kept.await
                .map_err(|(error, file)| tracing::error!(%error, %file, "a verified copy cannot be kept"))
                .is_ok(),
        )
    }
}
