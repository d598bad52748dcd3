//! The mount: Tier-1's files under a path, through FUSE.
//!
//! Owns: the kernel's protocol, the data path of an open file, the mountpoint, the control directory. Does not own: what a call means
//! (`tidemark_namespace`), memory (`tidemark_tier1`). `SEMANTICS.md` has the promises of each call.
//!
//! Three things are kept apart so that a later daemon can take a mount over ([`take_over`]): the descriptor of `/dev/fuse`
//! ([`Mounted::device`]), the session loop that reads it (fuser's), and the state it serves (the namespace).

mod adapter;
mod attr;
mod awake;
mod backing_ids;
mod cold;
mod control_dir;
mod convert;
mod counters;
mod device;
mod entries;
mod errno;
mod error;
mod fusermount;
mod gate;
mod handle;
mod handshake;
mod holders;
mod host;
mod init;
mod listing;
mod locks;
mod mount;
mod named;
mod notify;
mod probe;
mod promptly;
mod room;
mod session;
mod set;
mod shared;

pub use counters::{Counters, Opcode};
pub use error::MountError;
pub use handshake::InitExchange;
pub use holders::{Holder, holders};
pub use host::Host;
pub use notify::Invalidator;
pub use session::{
    KeptMount, Mode, ModeChoice, MountRecord, MountSettings, Mounted, SessionSettings, give_up, mount,
    probe_mode, take_over,
};
