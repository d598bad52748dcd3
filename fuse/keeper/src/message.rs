//! The messages between daemon and keeper.
//!
//! Owns: their text. Does not own: the sockets (`store`, `keep`).
//!
//! A message is lines of `NAME=value`, as sd_notify(3) has them, so that the daemon can send the same to systemd. Names that begin with
//! `X_` are additions for the keeper, which systemd ignores.

/// Raised when a daemon could misunderstand a keeper or the other way round. An upgrade may replace the daemon only.
pub const PROTOCOL_VERSION: u32 = 1;

/// The longest message: a path and some words.
pub(crate) const MESSAGE_MAX_BYTES: usize = 8 << 10;

/// A message of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Keep the descriptor that comes with this message under a name.
    Store { name: String },
    /// Close a kept descriptor.
    Remove { name: String },
    /// The daemon serves.
    Ready,
    /// The daemon ends on purpose: the keeper does not restart it, and ends with its exit code.
    Stopping,
    /// The daemon is about to take over Tier-1: the keeper must leave it alone from now on, and confirm that.
    Taking,
    /// The daemon's loop has turned.
    Turned,
    /// The path of the mount, so that the keeper can unmount it when no daemon can.
    Mount { path: Vec<u8> },
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Store { name } => format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0").into_bytes(),
            Self::Remove { name } => format!("FDSTOREREMOVE=1\nFDNAME={name}").into_bytes(),
            Self::Ready => b"READY=1".to_vec(),
            Self::Stopping => b"STOPPING=1".to_vec(),
            Self::Taking => b"X_TAKING=1".to_vec(),
            Self::Turned => b"WATCHDOG=1".to_vec(),
            Self::Mount { path } => [b"X_MOUNT=", path.as_slice()].concat(),
        }
    }

    /// Returns `None` for an unknown message: a newer daemon may send more kinds.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let value = |name: &[u8]| {
            bytes.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name)?.strip_prefix(b"="))
        };
        let text =
            |name: &[u8]| value(name).and_then(|value| std::str::from_utf8(value).ok()).map(str::to_owned);
        if value(b"FDSTORE").is_some() {
            return Some(Self::Store { name: text(b"FDNAME")? });
        }
        if value(b"FDSTOREREMOVE").is_some() {
            return Some(Self::Remove { name: text(b"FDNAME")? });
        }
        // A path may hold a line feed: everything after the equals sign is the path.
        if let Some(path) = bytes.strip_prefix(b"X_MOUNT=") {
            return Some(Self::Mount { path: path.to_vec() });
        }
        let words = [
            (&b"READY"[..], Self::Ready),
            (b"STOPPING", Self::Stopping),
            (b"X_TAKING", Self::Taking),
            (b"WATCHDOG", Self::Turned),
        ];
        words.into_iter().find_map(|(name, message)| value(name).map(|_| message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let path = b"/mnt/with\nline feed".to_vec();
        let name = "device".to_owned();
        for message in [
            Message::Store { name: name.clone() },
            Message::Remove { name },
            Message::Ready,
            Message::Stopping,
            Message::Taking,
            Message::Turned,
            Message::Mount { path },
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn what_is_not_known_is_passed_over() {
        for odd in
            [&b""[..], b"=", b"FDSTORE=1", b"STATUS=fine", b"\xff=\xff", b"READY", b"FDSTORE=1\nFDNAME=\xff"]
        {
            assert_eq!(Message::decode(odd), None, "{odd:?}");
        }
    }
}
