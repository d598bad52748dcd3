//! Encoders, as many as cores may be taken from the training, and the room for what they made.
//!
//! Owns: how many, who waits for one. Does not own: what is encoded (`encode`).

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use tidemark_kernels::encoding::Encoder;
use tokio::sync::Semaphore;

/// Encoded chunks kept from the first pass, over all files: 128 MiB at most, since none is longer than its chunk.
const KEPT_CHUNKS: usize = 16;

/// One of so many cores encodes; the others are the training's, whose data is loaded and decoded on them.
const CORES_PER_ENCODER: usize = 2;

/// More would outrun any network, and each of the files in flight has as many threads waiting for one.
const ENCODERS_MAX: usize = 8;

/// The encoders of a drain: as many as cores may be taken from the training. Who needs one waits for it.
#[derive(Debug)]
pub(crate) struct Coders {
    pub(super) most: usize,
    pub(super) kept: Arc<Semaphore>,
    state: Mutex<Idle>,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Idle {
    made: usize,
    encoders: Vec<Encoder>,
}

impl Coders {
    /// None is made before one is needed.
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Self {
            most: (cores / CORES_PER_ENCODER).clamp(1, ENCODERS_MAX),
            kept: Arc::new(Semaphore::new(KEPT_CHUNKS)),
            state: Mutex::default(),
            given_back: Condvar::new(),
        }
    }

    /// Runs `f` with one of the encoders. Blocks until one is free: for the blocking pool only.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Encoder) -> io::Result<R>) -> io::Result<R> {
        let mut idle = self.state.lock().expect("counting does not panic");
        let encoder = loop {
            if let Some(encoder) = idle.encoders.pop() {
                break encoder;
            }
            if idle.made < self.most {
                let encoder = Encoder::new()?;
                idle.made += 1;
                break encoder;
            }
            idle = self.given_back.wait(idle).expect("counting does not panic");
        };
        drop(idle);
        let mut lent = Lent { coders: self, encoder: Some(encoder) };
        f(lent.encoder.as_mut().expect("it goes back when this is dropped"))
    }
}

/// An encoder that goes back however its use ends.
struct Lent<'a> {
    coders: &'a Coders,
    encoder: Option<Encoder>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut idle = self.coders.state.lock().expect("counting does not panic");
        idle.encoders.extend(self.encoder.take());
        self.coders.given_back.notify_one();
    }
}
