//! The keeper: a small process that holds what must outlive `ckptd`, and starts it again when it dies.
//!
//! | file | owns |
//! |---|---|
//! | `keep` | the loop: one child, its descriptors, signals, upgrades, the end |
//! | `restart` | when to start again, and when that has become a crash loop; pure |
//! | `pulse` | when a daemon that lives counts as hung |
//! | `run_ahead` | space ahead of growing files while no daemon is there |
//! | `stand_in` | the few answers that open files need while daemons die again and again |
//! | `closing` | closed or cut |
//! | `message` | the messages between daemon and keeper: sd_notify(3)'s, and a few additional ones |
//! | `store` | the daemon's side: descriptors it received, descriptors it passes on |
//! | `control` | the socket through which an upgrade is requested |
//! | `sys` | the calls that need unsafe: signals, descriptors across exec |
//!
//! Does not own: the meaning of the descriptors. To the keeper they are names. A mount lives because some process has its `/dev/fuse` open,
//! and Tier-1 because some process has its directories open. `engine/design/0009-keeper.md` has the reasons.
//!
//! Everything the keeper does is bounded: the number of descriptors, the bytes of a message, and one child.

mod closing;
mod control;
mod keep;
mod message;
mod pulse;
mod restart;
mod run_ahead;
mod stand_in;
mod store;
mod sys;

pub use closing::{ClosedBy, closed_by};
pub use control::{UpgradeError, request_upgrade};
pub use keep::{Kept, Plan, keep};
pub use message::PROTOCOL_VERSION;
pub use stand_in::Answered;
pub use store::{Inherited, Keeper, StoreError};

/// Names of the descriptors that the keeper itself examines; the daemon's code uses the same.
pub mod names {
    /// The directory of backing files.
    pub const FILES: &str = "files";
    /// The directory of ballast.
    pub const BALLAST: &str = "ballast";
    /// `/dev/fuse` of the mount.
    pub const DEVICE: &str = "device";
    /// The answers that the keeper gave in the place of a daemon.
    pub const ANSWERED: &str = "answered";
    /// The lock of the state directory.
    pub const LOCK: &str = "lock";
}
