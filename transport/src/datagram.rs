//! Datagrams that prove their sender: for messages that are worthless when late, such as heartbeats.
//!
//! Owns: the layout, the signature, and refusing a datagram that was recorded and sent again. Does not own: the keys. Callers exchange them
//! on a control link, one for each direction, and draw new ones for each run of a daemon.
//!
//! ```text
//!  0         4     5        6           6+n       14+n        …         +16
//!  | magic   | ver | n      | sender    | number  | body      | signature |
//! ```
//! The signature is the first 16 bytes of a keyed blake3 of everything before it. Numbers of a sender only rise. A receiver remembers the
//! last [`WINDOW`], so that datagrams that overtake each other arrive and a repeated one does not. A body can be read on the way; its
//! sender cannot be forged.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::net::UdpSocket;

use crate::names::{NAME_BYTES_MAX, is_name};

/// The longest body, in bytes. With everything around it, it fits the smallest packet of the networks in use (1,500 bytes) without being
/// cut apart.
pub const DATAGRAM_BYTES_MAX: usize = 1200;

const MAGIC: &[u8; 4] = b"tide";
const VERSION: u8 = 1;
const SIGNATURE_BYTES: usize = 16;
const HEAD_BYTES: usize = 6;
const NUMBER_BYTES: usize = 8;
const PACKET_BYTES_MAX: usize =
    HEAD_BYTES + NAME_BYTES_MAX + NUMBER_BYTES + DATAGRAM_BYTES_MAX + SIGNATURE_BYTES;

const _: () = assert!(PACKET_BYTES_MAX + 48 <= 1500, "IPv6 and UDP headers must fit beside it");

/// How far a datagram may be overtaken: 64 beats are ten seconds at the shortest interval.
pub const WINDOW: u64 = 64;

/// The most senders and receivers. An entry is some hundred bytes. The largest cluster's coordinator hears that many nodes.
pub const KEYS_MAX: usize = 131_072;

/// A secret between one sender and one receiver. `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// Draws a new key, to be handed over on a control link.
    pub fn random() -> Self {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("the kernel has random numbers");
        Self(key)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Datagrams that were dropped, by reason. Counted, not logged: anybody can send them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Not a datagram of this protocol, or of another version.
    pub malformed: u64,
    /// Longer than any valid datagram.
    pub oversized: u64,
    /// From a node without a key here.
    pub unknown: u64,
    /// The signature is not the sender's.
    pub forged: u64,
    /// Received before, or older than [`WINDOW`] others.
    pub replayed: u64,
}

/// Why a datagram was not sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    /// The body is longer than a datagram carries.
    #[error("a body of {bytes} bytes is more than a datagram carries ({DATAGRAM_BYTES_MAX})")]
    TooBig {
        /// The body's length.
        bytes: usize,
    },
    /// No key for that node was handed over.
    #[error("there is no key for datagrams to {node}; exchange one on its control link")]
    NoKey {
        /// The receiver.
        node: String,
    },
    /// The table of keys is full.
    #[error("{KEYS_MAX} keys are the most; forget some nodes")]
    TooMany,
    /// A name that no node can have.
    #[error("`{name}` is no name of a node")]
    Name {
        /// The name.
        name: String,
    },
    /// The system could not send it. Nothing is retried: the next datagram will do.
    #[error("sending a datagram to {address} failed")]
    Send {
        /// The receiver's address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// A socket for signed datagrams. Dropping it closes it.
pub struct Datagrams {
    node: String,
    socket: UdpSocket,
    keys: Mutex<Keys>,
    dropped: [AtomicU64; 5],
}

#[derive(Default)]
struct Keys {
    to: HashMap<String, Outbound>,
    from: HashMap<String, Inbound>,
}

struct Outbound {
    key: Key,
    number: u64,
}

struct Inbound {
    key: Key,
    seen: Seen,
}

impl fmt::Debug for Datagrams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Datagrams")
            .field("node", &self.node)
            .field("dropped", &self.dropped())
            .finish_non_exhaustive()
    }
}

impl Datagrams {
    /// Opens a socket. Port 0 chooses a free port.
    ///
    /// # Errors
    /// The address is taken, or not this machine's.
    pub async fn bind(node: &str, address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address).await?;
        Ok(Self { node: node.to_owned(), socket, keys: Mutex::default(), dropped: Default::default() })
    }

    /// Returns the local address, with the port that was chosen.
    ///
    /// # Errors
    /// The system's error.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Sets the key for datagrams to a node. Numbers restart with each key, so a key is never used again.
    ///
    /// # Errors
    /// Too many keys, or an invalid name.
    pub fn set_key_to(&self, node: &str, key: Key) -> Result<(), DatagramError> {
        let mut keys = self.room_for(node)?;
        keys.to.insert(node.to_owned(), Outbound { key, number: 0 });
        Ok(())
    }

    /// Sets the key for datagrams from a node. If the key is the same as before, datagrams that came before stay refused.
    ///
    /// # Errors
    /// Too many keys, or an invalid name.
    pub fn set_key_from(&self, node: &str, key: Key) -> Result<(), DatagramError> {
        let mut keys = self.room_for(node)?;
        if keys.from.get(node).is_none_or(|inbound| inbound.key != key) {
            keys.from.insert(node.to_owned(), Inbound { key, seen: Seen::default() });
        }
        Ok(())
    }

    /// Forgets a node's keys, both ways.
    pub fn forget(&self, node: &str) {
        let mut keys = self.keys();
        keys.to.remove(node);
        keys.from.remove(node);
    }

    /// Sends once. `Ok` does not mean that the datagram arrived. Cancel safe.
    ///
    /// # Errors
    /// A body that is too long, a node without a key, or the system's error.
    pub async fn send(&self, node: &str, address: SocketAddr, body: &[u8]) -> Result<(), DatagramError> {
        let packet = {
            let mut keys = self.keys();
            let outbound =
                keys.to.get_mut(node).ok_or_else(|| DatagramError::NoKey { node: node.to_owned() })?;
            if body.len() > DATAGRAM_BYTES_MAX {
                return Err(DatagramError::TooBig { bytes: body.len() });
            }
            outbound.number += 1;
            encode(&self.node, outbound.number, body, &outbound.key)
        };
        self.socket
            .send_to(&packet, address)
            .await
            .map(drop)
            .map_err(|source| DatagramError::Send { address, source })
    }

    /// Waits for the next datagram of a known node, and returns the node's name and the body. Other datagrams are counted and dropped.
    /// Cancel safe.
    ///
    /// # Errors
    /// The system's error of the socket.
    pub async fn receive(&self) -> io::Result<(String, Vec<u8>)> {
        // Longer by a byte than the longest valid datagram, so that a longer one is noticed.
        let mut packet = [0; PACKET_BYTES_MAX + 1];
        loop {
            let bytes = match self.socket.recv_from(&mut packet).await {
                Ok((bytes, _)) => bytes,
                // A port was closed to an earlier datagram from here; that says nothing about the next one to come.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(error) => return Err(error),
            };
            match self.open(&packet[..bytes]) {
                Ok(heard) => return Ok(heard),
                Err(refused) => self.dropped[refused as usize].fetch_add(1, Ordering::Relaxed),
            };
        }
    }

    /// Returns the numbers of datagrams dropped so far.
    pub fn dropped(&self) -> Dropped {
        let count = |refused: Refused| self.dropped[refused as usize].load(Ordering::Relaxed);
        Dropped {
            malformed: count(Refused::Malformed),
            oversized: count(Refused::Oversized),
            unknown: count(Refused::Unknown),
            forged: count(Refused::Forged),
            replayed: count(Refused::Replayed),
        }
    }

    fn open(&self, packet: &[u8]) -> Result<(String, Vec<u8>), Refused> {
        if packet.len() > PACKET_BYTES_MAX {
            return Err(Refused::Oversized);
        }
        let read = decode(packet).ok_or(Refused::Malformed)?;
        let mut keys = self.keys();
        let inbound = keys.from.get_mut(read.sender).ok_or(Refused::Unknown)?;
        if !read.is_signed(&inbound.key) {
            return Err(Refused::Forged);
        }
        if read.body.len() > DATAGRAM_BYTES_MAX {
            return Err(Refused::Oversized);
        }
        // Checked last: a number without a valid signature must not move the window.
        if !inbound.seen.is_new(read.number) {
            return Err(Refused::Replayed);
        }
        Ok((read.sender.to_owned(), read.body.to_vec()))
    }

    fn room_for(&self, node: &str) -> Result<MutexGuard<'_, Keys>, DatagramError> {
        if !is_name(node) {
            return Err(DatagramError::Name { name: node.to_owned() });
        }
        let keys = self.keys();
        let is_full = |count: usize, is_there: bool| count >= KEYS_MAX && !is_there;
        if is_full(keys.to.len(), keys.to.contains_key(node))
            || is_full(keys.from.len(), keys.from.contains_key(node))
        {
            return Err(DatagramError::TooMany);
        }
        Ok(keys)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    Malformed,
    Oversized,
    Unknown,
    Forged,
    Replayed,
}

fn encode(sender: &str, number: u64, body: &[u8], key: &Key) -> Vec<u8> {
    let mut packet = Vec::with_capacity(PACKET_BYTES_MAX);
    packet.extend_from_slice(MAGIC);
    packet.push(VERSION);
    packet.push(u8::try_from(sender.len()).expect("names are short"));
    packet.extend_from_slice(sender.as_bytes());
    packet.extend_from_slice(&number.to_le_bytes());
    packet.extend_from_slice(body);
    let signature = blake3::keyed_hash(&key.0, &packet);
    packet.extend_from_slice(&signature.as_bytes()[..SIGNATURE_BYTES]);
    packet
}

/// A datagram's parts, before anything about it is proved.
#[derive(Debug)]
struct Read<'a> {
    sender: &'a str,
    number: u64,
    body: &'a [u8],
    signed: &'a [u8],
    signature: [u8; SIGNATURE_BYTES],
}

fn decode(packet: &[u8]) -> Option<Read<'_>> {
    let (signed, signature) = packet.split_last_chunk::<SIGNATURE_BYTES>()?;
    let rest = signed.strip_prefix(MAGIC)?.strip_prefix(&[VERSION])?;
    let (length, rest) = rest.split_first()?;
    let (sender, rest) = rest.split_at_checked(usize::from(*length))?;
    let (number, body) = rest.split_first_chunk()?;
    let sender = std::str::from_utf8(sender).ok().filter(|sender| is_name(sender))?;
    Some(Read { sender, number: u64::from_le_bytes(*number), body, signed, signature: *signature })
}

impl Read<'_> {
    fn is_signed(&self, key: &Key) -> bool {
        let expected = blake3::keyed_hash(&key.0, self.signed);
        // All bytes are compared in any case, so that the time taken does not reveal where they differ.
        let differing =
            expected.as_bytes().iter().zip(self.signature).fold(0, |all, (one, other)| all | (one ^ other));
        differing == 0
    }
}

/// Numbers received from a sender: the highest, and a bit for each of the [`WINDOW`] below it.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    highest: u64,
    below: u64,
}

impl Seen {
    /// Returns `true` once for each number above 0 that is at most [`WINDOW`] below the highest.
    fn is_new(&mut self, number: u64) -> bool {
        if number > self.highest {
            let risen = number - self.highest;
            // Bit 0 is the number just below the highest.
            self.below = match u32::try_from(risen) {
                Ok(risen) if risen < u64::BITS => self.below << risen | 1 << (risen - 1),
                Ok(u64::BITS) => 1 << (u64::BITS - 1),
                _ => 0,
            };
            self.highest = number;
            return true;
        }
        let age = self.highest - number;
        if number == 0 || age == 0 || age > WINDOW {
            return false;
        }
        let bit = 1 << (age - 1);
        let is_new = self.below & bit == 0;
        self.below |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::time::Duration;

    async fn pair() -> (Datagrams, Datagrams, SocketAddr, Key) {
        let anywhere = "127.0.0.1:0".parse().expect("an address");
        let a = Datagrams::bind("a", anywhere).await.expect("a socket");
        let b = Datagrams::bind("b", anywhere).await.expect("a socket");
        let (to, key) = (b.local_address().expect("an address"), Key::random());
        a.set_key_to("b", key).expect("room");
        b.set_key_from("a", key).expect("room");
        (a, b, to, key)
    }

    async fn heard(b: &Datagrams) -> (String, Vec<u8>) {
        tokio::time::timeout(Duration::from_secs(10), b.receive())
            .await
            .expect("in time")
            .expect("a datagram")
    }

    #[tokio::test]
    async fn a_datagram_tells_who_sent_it() {
        let (a, b, to, _) = pair().await;
        for body in [vec![], vec![1, 2, 3], vec![9; DATAGRAM_BYTES_MAX]] {
            a.send("b", to, &body).await.expect("sent");
            assert_eq!(heard(&b).await, ("a".to_owned(), body));
        }
        let too_big = a.send("b", to, &[0; DATAGRAM_BYTES_MAX + 1]).await.expect_err("too big");
        assert!(matches!(too_big, DatagramError::TooBig { bytes: 1201 }), "{too_big}");
        assert!(matches!(a.send("c", to, &[]).await, Err(DatagramError::NoKey { .. })));
        assert_eq!(b.dropped(), Dropped::default());
    }

    #[tokio::test]
    async fn forged_replayed_oversized_and_strange_datagrams_are_counted_and_dropped() {
        let (a, b, to, key) = pair().await;
        let stranger = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let send = async |packet: Vec<u8>| {
            stranger.send_to(&packet, to).await.expect("sent");
        };
        let good = encode("a", 5, b"beat", &key);
        send(good.clone()).await;
        assert_eq!(heard(&b).await.1, b"beat");
        send(good.clone()).await;
        let mut changed = good.clone();
        changed[20] ^= 1;
        send(changed).await;
        send(encode("a", 6, b"beat", &Key::random())).await;
        send(encode("nobody", 1, b"beat", &key)).await;
        send(encode("a", 7, &[0; DATAGRAM_BYTES_MAX + 1], &key)).await;
        send(vec![0; 4000]).await;
        send(b"hello".to_vec()).await;
        send(good[..good.len() - 1].to_vec()).await;
        a.send("b", to, b"old").await.expect("sent");
        assert_eq!(heard(&b).await.1, b"old", "1 is new though 5 came first");
        let dropped = Dropped { malformed: 1, oversized: 2, unknown: 1, forged: 3, replayed: 1 };
        assert_eq!(b.dropped(), dropped);
    }

    #[tokio::test]
    async fn a_key_that_is_handed_over_again_does_not_let_old_datagrams_in() {
        let (a, b, to, key) = pair().await;
        a.send("b", to, b"one").await.expect("sent");
        heard(&b).await;
        b.set_key_from("a", key).expect("room");
        let stranger = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        stranger.send_to(&encode("a", 1, b"one", &key), to).await.expect("sent");
        a.send("b", to, b"two").await.expect("sent");
        assert_eq!(heard(&b).await.1, b"two");
        assert_eq!(b.dropped().replayed, 1);
    }

    proptest! {
        #[test]
        fn each_number_is_new_once(numbers in prop::collection::vec(prop_oneof![1..200u64, 1..2000u64], 1..300)) {
            let (mut seen, mut came, mut highest) = (Seen::default(), HashSet::new(), 0);
            for number in numbers {
                let is_far_below = number + WINDOW < highest;
                prop_assert_eq!(seen.is_new(number), !is_far_below && came.insert(number), "{}", number);
                highest = highest.max(number);
                came.insert(number);
            }
        }

        #[test]
        fn no_bytes_make_a_reader_panic(packet in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut ours = MAGIC.to_vec();
            ours.push(VERSION);
            ours.extend_from_slice(&packet);
            for packet in [packet, ours] {
                if let Some(read) = decode(&packet) {
                    prop_assert!(!read.is_signed(&Key([0; 32])));
                }
            }
        }
    }

    #[test]
    fn numbers_at_the_end_of_their_range_are_fine() {
        let mut seen = Seen::default();
        assert!(!seen.is_new(0));
        assert!(seen.is_new(u64::MAX));
        assert!(!seen.is_new(u64::MAX));
        assert!(seen.is_new(u64::MAX - WINDOW));
        assert!(!seen.is_new(1));
    }
}
