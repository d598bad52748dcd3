//! The greeting: the first message of every connection, in each direction, before all others.
//!
//! Owns: the contents of a greeting, their layout, and which two nodes may speak. Does not own: the certificate's part (`names`) nor which
//! other nodes are connected (`peers`).
//!
//! ```text
//!  0           8         10        12
//!  | magic     | version | length  | body …             numbers are little-endian
//! ```
//! Magic, version and length stay as they are in every version, so that two versions can tell each other which they are.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::Mismatch;
use crate::link::Identity;
use crate::names::is_name;

/// Protocol version. Rises when an older node could not understand a newer one. Since 2 a bulk connection begins as TLS where nodes have
/// certificates, and requests on it are not signed.
pub const VERSION: u16 = 2;

const MAGIC: &[u8; 8] = b"tidelink";

/// The first byte of a plain greeting; a TLS connection begins with 0x16.
pub(crate) const FIRST_BYTE: u8 = MAGIC[0];

const HEAD_BYTES: usize = 12;

/// The longest body. A hello has three names of 64 bytes and three numbers; a refusal has a sentence.
pub const BODY_BYTES_MAX: usize = 2048;

/// The longest sentence of a refusal, in bytes, so that its body fits.
const TEXT_BYTES_MAX: usize = 1024;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Calls and tells.
    Control,
    /// The bytes of files.
    Bulk,
    /// The bytes of files, which the opener's owner allows to travel unencrypted.
    OpenBulk,
}

/// The greeting of the node that opens a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The connection's purpose.
    pub purpose: Purpose,
    /// The opening node.
    pub identity: Identity,
    /// The coordinator's epoch as the opening node knows it.
    pub epoch: u64,
    /// The name of the node that the opener believes to have called.
    pub wanted: String,
}

/// The greeting of the called node when it agrees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The called node.
    pub identity: Identity,
    /// The coordinator's epoch as the called node knows it.
    pub epoch: u64,
    /// Number of requests that it accepts at a time on this connection.
    pub credits: u16,
    /// Whether bulk bytes are encrypted from here on between nodes with certificates, or only authenticated.
    pub encrypts: bool,
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The connection may be used.
    Welcome(Welcome),
    /// The connection is refused, and why, as the called node sees it.
    Sorry(Mismatch),
}

impl Hello {
    /// Encodes the greeting's body.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = vec![match self.purpose {
            Purpose::Control => 1,
            Purpose::Bulk => 2,
            Purpose::OpenBulk => 3,
        }];
        put_identity(&mut body, &self.identity);
        put_number(&mut body, self.epoch);
        put_text(&mut body, &self.wanted);
        body
    }

    /// Reads a received body.
    ///
    /// # Errors
    /// [`Mismatch::NotALink`] for anything that [`Hello::encode`] does not write.
    pub fn decode(body: &[u8]) -> Result<Self, Mismatch> {
        let mut rest = Rest(body);
        let purpose = match rest.byte()? {
            1 => Purpose::Control,
            2 => Purpose::Bulk,
            3 => Purpose::OpenBulk,
            other => return Err(Mismatch::NotALink(format!("purpose {other} is unknown"))),
        };
        let (identity, epoch, wanted) = (rest.identity()?, rest.number()?, rest.name()?);
        rest.end(Self { purpose, identity, epoch, wanted })
    }

    /// Checks that this node may speak with the sender, as far as the hello shows.
    pub(crate) fn check(&self, ours: &Identity) -> Result<(), Mismatch> {
        if self.identity.cluster != ours.cluster {
            let (ours, theirs) = (ours.cluster.clone(), self.identity.cluster.clone());
            return Err(Mismatch::OtherCluster { ours, theirs });
        }
        if self.wanted != ours.node {
            return Err(Mismatch::OtherNode { wanted: self.wanted.clone(), found: ours.node.clone() });
        }
        if self.identity.node == ours.node && self.identity.incarnation != ours.incarnation {
            let (live, refused) = (ours.incarnation, self.identity.incarnation);
            return Err(Mismatch::TwoNodes { node: ours.node.clone(), live, refused });
        }
        Ok(())
    }
}

impl Answer {
    /// Encodes the greeting's body.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = vec![];
        match self {
            Self::Welcome(welcome) => {
                body.push(0);
                put_identity(&mut body, &welcome.identity);
                put_number(&mut body, welcome.epoch);
                body.extend_from_slice(&welcome.credits.to_le_bytes());
                body.push(u8::from(welcome.encrypts));
            }
            Self::Sorry(why) => put_mismatch(&mut body, why),
        }
        body
    }

    /// Reads a received body, and swaps the two ends so that the result is this node's view.
    ///
    /// # Errors
    /// [`Mismatch::NotALink`] for anything that [`Answer::encode`] does not write.
    pub fn decode(body: &[u8]) -> Result<Self, Mismatch> {
        let mut rest = Rest(body);
        let code = rest.byte()?;
        if code == 0 {
            let welcome = Welcome {
                identity: rest.identity()?,
                epoch: rest.number()?,
                credits: u16::from_le_bytes(rest.array()?),
                encrypts: match rest.byte()? {
                    0 => false,
                    1 => true,
                    other => return Err(Mismatch::NotALink(format!("protection {other} is unknown"))),
                },
            };
            return rest.end(Self::Welcome(welcome));
        }
        let why = match code {
            1 => {
                let (theirs, ours) = (rest.text()?, rest.text()?);
                Mismatch::OtherCluster { ours, theirs }
            }
            2 => {
                let (wanted, found) = (rest.text()?, rest.text()?);
                Mismatch::OtherNode { wanted, found }
            }
            3 => Mismatch::Certificate(rest.text()?),
            4 => Mismatch::TwoNodes { node: rest.text()?, live: rest.number()?, refused: rest.number()? },
            5 => Mismatch::Insecure { address: rest.text()? },
            6 => Mismatch::Busy,
            _ => Mismatch::NotALink(rest.text()?),
        };
        rest.end(Self::Sorry(why))
    }
}

fn put_mismatch(body: &mut Vec<u8>, why: &Mismatch) {
    match why {
        Mismatch::OtherCluster { ours, theirs } => {
            body.push(1);
            put_text(body, ours);
            put_text(body, theirs);
        }
        Mismatch::OtherNode { wanted, found } => {
            body.push(2);
            put_text(body, wanted);
            put_text(body, found);
        }
        Mismatch::Certificate(what) => {
            body.push(3);
            put_text(body, what);
        }
        Mismatch::TwoNodes { node, live, refused } => {
            body.push(4);
            put_text(body, node);
            put_number(body, *live);
            put_number(body, *refused);
        }
        Mismatch::Insecure { address } => {
            body.push(5);
            put_text(body, address);
        }
        Mismatch::Busy => body.push(6),
        // The version stands before every body, so it is not repeated here.
        other @ (Mismatch::NotALink(_) | Mismatch::OtherVersion { .. }) => {
            body.push(7);
            put_text(body, &other.to_string());
        }
    }
}

fn put_number(body: &mut Vec<u8>, number: u64) {
    body.extend_from_slice(&number.to_le_bytes());
}

/// Writes a length of two bytes and as much of the text as fits a greeting.
fn put_text(body: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(TEXT_BYTES_MAX)];
    let length = u16::try_from(text.len()).expect("it was cut above");
    body.extend_from_slice(&length.to_le_bytes());
    body.extend_from_slice(text.as_bytes());
}

fn put_identity(body: &mut Vec<u8>, identity: &Identity) {
    put_text(body, &identity.cluster);
    put_text(body, &identity.node);
    put_number(body, identity.incarnation);
    put_number(body, identity.start);
}

/// The bytes left to read.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take(&mut self, bytes: usize) -> Result<&[u8], Mismatch> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(|| {
            Mismatch::NotALink(format!("a greeting ends {} bytes early", bytes - self.0.len()))
        })?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Mismatch> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn byte(&mut self) -> Result<u8, Mismatch> {
        self.array().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, Mismatch> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, Mismatch> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        let text = std::str::from_utf8(self.take(length)?);
        text.map(str::to_owned).map_err(|_| Mismatch::NotALink("a greeting with a text that is none".into()))
    }

    fn name(&mut self) -> Result<String, Mismatch> {
        let name = self.text()?;
        if is_name(&name) { Ok(name) } else { Err(Mismatch::NotALink(format!("{name:?} is no name"))) }
    }

    fn identity(&mut self) -> Result<Identity, Mismatch> {
        let (cluster, node) = (self.name()?, self.name()?);
        Ok(Identity { cluster, node, incarnation: self.number()?, start: self.number()? })
    }

    fn end<T>(self, read: T) -> Result<T, Mismatch> {
        match self.0.len() {
            0 => Ok(read),
            more => Err(Mismatch::NotALink(format!("a greeting with {more} bytes after its end"))),
        }
    }
}

/// Sends a greeting under this node's version.
pub(crate) async fn say(to: &mut (impl AsyncWrite + Unpin), body: &[u8]) -> io::Result<()> {
    let mut greeting = Vec::with_capacity(HEAD_BYTES + body.len());
    greeting.extend_from_slice(MAGIC);
    greeting.extend_from_slice(&VERSION.to_le_bytes());
    greeting.extend_from_slice(&u16::try_from(body.len()).expect("greetings are short").to_le_bytes());
    greeting.extend_from_slice(body);
    to.write_all(&greeting).await?;
    to.flush().await
}

/// Receives a greeting's body. The outer error is the connection's, the inner one the greeting's.
pub(crate) async fn hear(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Result<Vec<u8>, Mismatch>> {
    let mut head = [0; HEAD_BYTES];
    from.read_exact(&mut head).await?;
    let [magic @ .., v0, v1, l0, l1] = head;
    if magic != *MAGIC {
        return Ok(Err(Mismatch::NotALink(format!("it begins with {magic:02x?}"))));
    }
    let (version, length) = (u16::from_le_bytes([v0, v1]), usize::from(u16::from_le_bytes([l0, l1])));
    if version != VERSION {
        return Ok(Err(Mismatch::OtherVersion { ours: VERSION, theirs: version }));
    }
    if length > BODY_BYTES_MAX {
        let what = format!("a greeting of {length} bytes, more than {BODY_BYTES_MAX}");
        return Ok(Err(Mismatch::NotALink(what)));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).await?;
    Ok(Ok(body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identity() -> impl Strategy<Value = Identity> {
        ("[a-z][a-z0-9.-]{0,63}", "[A-Z][a-z0-9._]{0,63}", any::<u64>(), any::<u64>())
            .prop_map(|(cluster, node, incarnation, start)| Identity { cluster, node, incarnation, start })
    }

    proptest! {
        #[test]
        fn greetings_read_back_as_they_were_written(
            identity in identity(), epoch: u64, credits: u16, encrypts: bool, text in "\\PC{0,40}", purpose in 0..3_usize
        ) {
            let purpose = [Purpose::Control, Purpose::Bulk, Purpose::OpenBulk][purpose];
            let wanted = identity.node.clone();
            let hello = Hello { purpose, identity: identity.clone(), epoch, wanted };
            prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            let welcome = Answer::Welcome(Welcome { identity, epoch, credits, encrypts });
            prop_assert!(welcome.encode().len() <= BODY_BYTES_MAX);
            prop_assert_eq!(Answer::decode(&welcome.encode()), Ok(welcome));
            for why in [
                Mismatch::OtherNode { wanted: text.clone(), found: text.clone() },
                Mismatch::Certificate(text.clone()),
                Mismatch::TwoNodes { node: text.clone(), live: epoch, refused: 1 },
                Mismatch::Insecure { address: text.clone() },
                Mismatch::Busy,
            ] {
                prop_assert_eq!(Answer::decode(&Answer::Sorry(why.clone()).encode()), Ok(Answer::Sorry(why)));
            }
        }

        #[test]
        fn no_bytes_make_a_greeter_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Hello::decode(&bytes);
            let _ = Answer::decode(&bytes);
        }
    }

    #[test]
    fn a_refusal_of_a_cluster_is_told_from_the_listeners_side() {
        let why = Mismatch::OtherCluster { ours: "red".into(), theirs: "blue".into() };
        let told = Answer::decode(&Answer::Sorry(why).encode());
        let seen = Mismatch::OtherCluster { ours: "blue".into(), theirs: "red".into() };
        assert_eq!(told, Ok(Answer::Sorry(seen)));
    }

    #[test]
    fn the_longest_refusal_fits_a_greeting() {
        let why = Mismatch::Certificate("ä".repeat(4000));
        assert!(Answer::Sorry(why).encode().len() <= BODY_BYTES_MAX);
    }
}
