//! Encoders, as many as cores may be taken from the training, and the room for encoded chunks.
//!
//! Owns: the number of encoders, waiting for one. Does not own: which chunks are encoded (`encode`).

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use tidemark_kernels::encoding::Encoder;
use tokio::sync::Semaphore;

/// Maximum number of encoded chunks kept from the first pass, over all files: 128 MiB, since an encoded chunk is no longer than its
/// chunk.
const KEPT_CHUNKS: usize = 16;

/// Cores for each encoder: one of them encodes, and the others load and decode the training's data.
const CORES_PER_ENCODER: usize = 2;

/// Maximum number of encoders. More would outrun any network, and each file in flight has as many threads waiting for one.
const ENCODERS_MAX: usize = 8;

/// The encoders of a drain: as many as cores may be taken from the training. A caller waits until one is free.
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
    /// Makes the set; each encoder is made when it is first needed.
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

/// An encoder in use, which goes back however its use ends.
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
