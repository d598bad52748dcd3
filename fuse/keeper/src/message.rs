//! The words between daemon and keeper.
//!
//! Owns: their text. Does not own: the sockets (`store`, `keep`).
//!
//! A message is lines of `NAME=value`, as sd_notify(3) has them, so that the daemon says the same to systemd. Those that
//! begin with `X_` are ours, which systemd passes over.

/// Raised when a daemon could misunderstand a keeper or the other way round. An upgrade may change the daemon only.
pub const PROTOCOL_VERSION: u32 = 1;

/// The longest message: a path and some words.
pub(crate) const MESSAGE_MAX_BYTES: usize = 8 << 10;

/// What a daemon says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Keep the descriptor that comes with this under a name.
    Store { name: String },
    /// Let a kept descriptor go.
    Remove { name: String },
    /// It serves.
    Ready,
    /// It ends on purpose: its exit code is the last word.
    Stopping,
    /// It is about to take Tier-1 over: leave it alone from now on, and say so.
    Taking,
    /// Its loop has turned.
    Turned,
    /// Where the mount is, for the keeper to take it away when nobody else can.
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

    /// None for what is not known: a newer daemon may say more.
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
        // A path may hold a line feed: everything behind the sign is the path.
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
