//! Goal: whatever is lost, repeated, late or dies, acknowledged copies have the sealed bytes, in the end everything is acknowledged, and
//! lost answers do not make bytes travel again. Method: both machines are joined by a link that a schedule misuses; a chunk's content is
//! one number, and its checksum that number.

use super::*;
use crate::checksum::Crc64;
use crate::file::Seal;
use crate::id::{ContentHash, FileCounter, FileId, Incarnation, SealNumber};
use crate::layout::{CHUNK_BYTES, chunk_count};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const FILE: FileId = FileId { incarnation: Incarnation(7), counter: FileCounter(3) };

fn meta() -> CopyMeta {
    CopyMeta {
        path: b"run/step1.pt".to_vec(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime_ns: 5,
        xattrs: vec![(b"user.a".to_vec(), b"b".to_vec())],
        home: "n1".to_owned(),
        published_at_ns: 6,
        facts: vec![1, 2, 3],
    }
}

/// The partner's machine, with numbers as its memory.
struct Partner {
    landing: Landing,
    holder: Holder,
    bytes: BTreeMap<u64, u64>,
    touched: BTreeSet<u64>,
    token: Option<BulkToken>,
    tokens: u8,
    copies: BTreeMap<SealNumber, Vec<u64>>,
    /// Pieces of pushes that were cut, and may land at any time; the flag says whether they have begun to.
    moving: Vec<(u64, u64, bool)>,
    room: bool,
}

impl Partner {
    fn new(incarnation: u64, now: Duration) -> Self {
        let holder = Holder(Incarnation(incarnation));
        Self {
            landing: Landing::new(FILE, holder, now),
            holder,
            bytes: BTreeMap::new(),
            touched: BTreeSet::new(),
            token: None,
            tokens: 0,
            copies: BTreeMap::new(),
            moving: Vec::new(),
            room: true,
        }
    }

    fn write(&mut self, chunk: u64, value: u64) {
        self.bytes.insert(chunk, value);
        self.touched.insert(chunk);
    }

    /// Does what the engine's receiver does, without the memory.
    fn answer(&mut self, ask: &Ask, sealed: Option<&SealedCopy>, now: Duration) -> Answer {
        let mut pending = None;
        let event = match ask {
            Ask::Begin { until_bytes, sealed, differs } => {
                LandingEvent::Begin { until_bytes: *until_bytes, sealed: *sealed, differs: *differs }
            }
            Ask::Landed { chunks, until_bytes } => {
                LandingEvent::Landed { chunks: chunks.clone(), until_bytes: *until_bytes }
            }
            Ask::Keep(_) => {
                pending = sealed.cloned();
                LandingEvent::Keep(Box::new(sealed.cloned().expect("what is kept is sealed")))
            }
            Ask::Small(seal) | Ask::Prove(seal, _) => panic!("{seal} is neither small nor alike"),
        };
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for command in self.landing.step(event, now) {
                events.push(match command {
                    LandingCommand::Answer(answer) => return answer,
                    LandingCommand::LookUp { seal, .. } => {
                        LandingEvent::Found { copy: self.copies.contains_key(&seal), alike: false }
                    }
                    LandingCommand::Settle => {
                        self.token = None;
                        let touched = std::mem::take(&mut self.touched).into_iter().collect();
                        LandingEvent::Settled { touched, quiet: self.moving.is_empty() }
                    }
                    LandingCommand::Hash { chunks, .. } => {
                        let sum = |chunk| Some((chunk, Crc64(*self.bytes.get(&chunk)?)));
                        LandingEvent::Hashed(chunks.into_iter().filter_map(sum).collect())
                    }
                    LandingCommand::Grant { .. } if !self.room => {
                        LandingEvent::NoRoom { wanted_bytes: 9, free_bytes: 1 }
                    }
                    LandingCommand::Grant { .. } => {
                        self.tokens = self.tokens.wrapping_add(1);
                        let token = BulkToken([self.tokens; 16]);
                        self.token = Some(token);
                        LandingEvent::Granted(token)
                    }
                    LandingCommand::Keep => {
                        assert!(self.moving.is_empty(), "kept while somebody may write");
                        let copy = pending.take().expect("only what was sent whole is kept");
                        let bytes = std::mem::take(&mut self.bytes);
                        let kept: Vec<u64> =
                            (0..copy.chunks.len() as u64).map(|chunk| bytes[&chunk]).collect();
                        let sums: Vec<Crc64> = kept.iter().copied().map(Crc64).collect();
                        assert_eq!(sums, copy.chunks, "a copy has other bytes than were sealed");
                        self.copies.insert(copy.seal, kept);
                        LandingEvent::Kept(true)
                    }
                });
            }
        }
        panic!("a request was not answered");
    }
}

/// An operation under way at the home.
enum Under {
    Call { op: u64, ask: Ask },
    Push { op: u64, token: BulkToken, chunks: Vec<u64> },
}

struct World {
    now: Duration,
    chunks: Vec<u64>,
    written: u64,
    seals: u64,
    sealed: Option<SealedCopy>,
    sender: Sender,
    partner: Partner,
    under: Vec<Under>,
    late: Vec<(u64, Ask, Option<SealedCopy>)>,
    acknowledged: BTreeSet<(SealNumber, Holder)>,
    pushed_chunks: u64,
}

const SIZE: u64 = 5 * CHUNK_BYTES;

impl World {
    fn new() -> Self {
        let now = Duration::ZERO;
        Self {
            now,
            chunks: vec![0; 5],
            written: 0,
            seals: 0,
            sealed: None,
            sender: Sender::new(FILE),
            partner: Partner::new(100, now),
            under: Vec::new(),
            late: Vec::new(),
            acknowledged: BTreeSet::new(),
            pushed_chunks: 0,
        }
    }

    fn step(&mut self, event: SenderEvent) {
        let mut todo = Vec::new();
        self.sender.step(event, self.now, &mut todo);
        for command in todo {
            match command {
                SenderCommand::Call { op, ask } => self.under.push(Under::Call { op, ask }),
                SenderCommand::Push { op, token, chunks } => {
                    self.under.push(Under::Push { op, token, chunks })
                }
                SenderCommand::Hash { op } => {
                    self.step(SenderEvent::Hashed { op, hash: ContentHash::of(b"") });
                }
                SenderCommand::Acknowledged { seal, by } => {
                    if by == self.partner.holder {
                        assert!(
                            self.partner.copies.contains_key(&seal),
                            "{seal} was acknowledged and is not there"
                        );
                    }
                    self.acknowledged.insert((seal, by));
                }
                SenderCommand::Wake { .. } => {}
            }
        }
        assert!(self.under.len() <= 1, "one thing at a time");
    }

    fn seal(&mut self) {
        self.written = 5;
        self.seals += 1;
        let chunks: Vec<Crc64> = self.chunks.iter().copied().map(Crc64).collect();
        let crc = Crc64::combine_all(&chunks, SIZE).unwrap();
        let seal = Seal { number: SealNumber(self.seals), size_bytes: SIZE, crc, chunks: chunks.into() };
        self.sealed = Some(SealedCopy::new(FILE, &seal, meta()));
        self.step(SenderEvent::Sealed(seal));
    }

    /// Makes one fault or one step forward.
    fn happen(&mut self, what: u8, value: u8) {
        let at = u64::from(value) % 5;
        match what % 16 {
            0 if self.sealed.is_none() && self.written < 5 => {
                self.chunks[usize::try_from(self.written).unwrap()] = u64::from(value) + 1;
                self.written += 1;
                self.step(SenderEvent::Grew { stable_bytes: self.written * CHUNK_BYTES });
            }
            // A chunk changes after it was streamed.
            1 if self.sealed.is_none() => self.chunks[usize::try_from(at).unwrap()] = u64::from(value) + 300,
            2 if self.sealed.is_none() => self.seal(),
            3 if self.sealed.is_some() && self.seals < 3 => {
                self.sealed = None;
                self.chunks[usize::try_from(at).unwrap()] = u64::from(value) + 600;
                self.step(SenderEvent::Changed);
            }
            // The question is lost; the answer is lost; it comes twice; it comes later once more.
            4 => self.fail(false),
            5 => self.fail(true),
            6 => self.deliver(true),
            7 => {
                if let Some(Under::Call { op, ask }) = self.under.last()
                    && !matches!(ask, Ask::Keep(seal) if self.is_past(*seal))
                {
                    self.late.push((*op, ask.clone(), self.sealed.clone()));
                }
                self.fail(false);
            }
            8 => self.late(),
            9 => self.land_late(),
            // The partner's daemon, or its memory, is lost.
            10 if value < 40 => {
                let copies = std::mem::take(&mut self.partner.copies);
                self.partner = Partner { copies, ..Partner::new(self.partner.holder.0.0, self.now) };
            }
            10 if value < 60 => {
                self.partner = Partner::new(self.partner.holder.0.0 + 1, self.now);
                self.acknowledged.clear();
                self.step(SenderEvent::Forgotten);
            }
            // The home's daemon is lost.
            11 if value < 40 => {
                self.under.clear();
                self.late.iter_mut().for_each(|(op, ..)| *op = 0); // Their answers are nobody's.
                self.sender = Sender::new(FILE);
                self.step(SenderEvent::Grew { stable_bytes: self.written * CHUNK_BYTES });
                if let Some(copy) = &self.sealed {
                    self.step(SenderEvent::Sealed(copy.sealed()));
                }
            }
            12 => self.partner.room = value.is_multiple_of(2),
            13 => {
                self.now += Duration::from_secs(11);
                self.step(SenderEvent::Tick);
            }
            _ => self.deliver(false),
        }
    }

    /// Whether the caller cannot make that request any more.
    fn is_past(&self, seal: SealNumber) -> bool {
        self.sealed.as_ref().is_none_or(|copy| copy.seal != seal)
    }

    /// Completes the operation under way, and reports its end.
    fn deliver(&mut self, twice: bool) {
        match self.under.pop() {
            None => {
                self.now += Duration::from_millis(100);
                self.step(SenderEvent::Tick);
            }
            Some(Under::Call { op, ask: Ask::Keep(seal) }) if self.is_past(seal) => {
                self.step(SenderEvent::Failed { op, why: "the seal is no more".to_owned() });
            }
            Some(Under::Call { op, ask }) => {
                let answer = self.partner.answer(&ask, self.sealed.as_ref(), self.now);
                let answer =
                    if twice { self.partner.answer(&ask, self.sealed.as_ref(), self.now) } else { answer };
                self.step(SenderEvent::Answered { op, answer });
            }
            Some(Under::Push { op, token, chunks }) => {
                if self.partner.token != Some(token) {
                    return self.step(SenderEvent::Failed { op, why: "the token was refused".to_owned() });
                }
                let mut sums = Vec::new();
                for chunk in chunks {
                    let value = self.chunks[usize::try_from(chunk).unwrap()];
                    self.pushed_chunks += 1;
                    self.partner.write(chunk, value);
                    sums.push((chunk, Crc64(value)));
                }
                self.step(SenderEvent::Pushed { op, sums });
            }
        }
    }

    /// Makes the operation under way fail for the home. With `done` it happened all the same, a push to its half.
    fn fail(&mut self, done: bool) {
        let Some(under) = self.under.pop() else { return };
        let op = match under {
            Under::Call { op, ask } => {
                let past = matches!(ask, Ask::Keep(seal) if self.is_past(seal));
                if done && !past {
                    let _lost = self.partner.answer(&ask, self.sealed.as_ref(), self.now);
                }
                op
            }
            Under::Push { op, token, chunks } => {
                if self.partner.token == Some(token) {
                    for (index, chunk) in chunks.iter().enumerate() {
                        let value = self.chunks[usize::try_from(*chunk).unwrap()];
                        self.pushed_chunks += 1;
                        if done && index <= chunks.len() / 2 {
                            self.partner.write(*chunk, value);
                        } else {
                            self.partner.moving.push((*chunk, value, false));
                        }
                    }
                }
                op
            }
        };
        self.step(SenderEvent::Failed { op, why: "lost".to_owned() });
    }

    /// Delivers a request of long ago, whose answer is no longer awaited.
    fn late(&mut self) {
        if let Some((op, ask, sealed)) = self.late.pop() {
            let answer = self.partner.answer(&ask, sealed.as_ref(), self.now);
            self.step(SenderEvent::Answered { op, answer });
        }
    }

    /// Begins to write a piece of an old push; or writes it, and then the connection ends before anyone learns that the piece landed.
    fn land_late(&mut self) {
        match self.partner.moving.pop() {
            None => {}
            Some((chunk, value, false)) => {
                self.partner.touched.insert(chunk);
                self.partner.moving.push((chunk, value, true));
            }
            Some((chunk, value, true)) => {
                self.partner.bytes.insert(chunk, value);
            }
        }
    }

    /// Lets everything finish without further faults.
    fn rest(&mut self) {
        if self.sealed.is_none() {
            self.seal();
        }
        while !self.partner.moving.is_empty() {
            self.land_late();
        }
        while !self.late.is_empty() {
            self.late();
        }
        self.partner.room = true;
        for _ in 0..5000 {
            if self.sender.acknowledged().is_some() {
                return;
            }
            self.deliver(false);
        }
        panic!("it is never acknowledged: {:?}", self.sender);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn what_is_acknowledged_has_the_sealed_bytes_whatever_happens(happens: Vec<(u8, u8)>) {
        let mut world = World::new();
        for (what, value) in happens {
            world.happen(what, value);
        }
        world.rest();
        let (seal, by) = world.sender.acknowledged().unwrap();
        prop_assert_eq!(by, world.partner.holder);
        prop_assert_eq!(&world.partner.copies[&seal], &world.chunks);
    }

    #[test]
    fn lost_answers_make_no_byte_travel_again(lost: Vec<bool>, streamed in 0_u64..5) {
        let mut world = World::new();
        for at in 0..streamed {
            world.happen(0, u8::try_from(at).unwrap());
            world.deliver(false);
        }
        world.seal();
        for lost in lost {
            match (lost, world.under.last()) {
                (true, Some(Under::Call { .. })) => world.fail(true),
                // The bytes have landed, but the report of it was lost.
                (true, Some(Under::Push { op, .. })) => {
                    let op = *op;
                    let sender = std::mem::replace(&mut world.sender, Sender::new(FILE));
                    world.deliver(false);
                    world.under.clear();
                    world.sender = sender;
                    world.step(SenderEvent::Failed { op, why: "lost".to_owned() });
                }
                _ => world.deliver(false),
            }
        }
        world.rest();
        prop_assert!(world.pushed_chunks <= 5 + streamed, "{} chunks for 5", world.pushed_chunks);
    }

    #[test]
    fn messages_round_trip_and_garbage_is_refused(garbage: Vec<u8>, cut in 0_usize..400, chunks in 0_u64..40) {
        let size_bytes = chunks * CHUNK_BYTES;
        let sums: Vec<Crc64> = (0..chunks).map(Crc64).collect();
        let crc = Crc64::combine_all(&sums, size_bytes).unwrap();
        let copy = SealedCopy { file: FILE, seal: SealNumber(1), size_bytes, crc, chunks: sums, meta: meta() };
        let request = Request::Keep(copy);
        let bytes = encode(&request).unwrap();
        prop_assert_eq!(&decode::<Request>(&bytes).unwrap(), &request);
        prop_assert!(request.check().is_ok());
        if cut < bytes.len() {
            prop_assert!(decode::<Request>(&bytes[..cut]).is_err());
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        let trails = matches!(decode::<Request>(&longer), Err(MessageError::Trailing { left: 1, .. }));
        prop_assert!(trails);
        // Decoding ends, whatever the bytes are.
        let _ = decode::<Request>(&garbage);
        let _ = decode::<Answer>(&garbage);
    }
}

#[test]
fn a_length_that_lies_takes_no_memory() {
    // The tag of `Small`'s neighbour `Keep` with a list of 2^60 checksums.
    let mut bytes = encode(&Answer::Ready { have: Vec::new(), token: BulkToken([0; 16]) }).unwrap();
    assert_eq!(bytes[1], 0, "the length of the list");
    bytes.splice(1..2, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert!(matches!(decode::<Answer>(&bytes), Err(MessageError::Malformed { .. })));
    assert!(matches!(decode::<Answer>(&vec![0; MESSAGE_BYTES_MAX + 1]), Err(MessageError::TooLong { .. })));
}

#[test]
fn the_checksums_of_a_file_of_4_tib_fit_one_message() {
    let size_bytes = 4 << 40;
    let chunks = vec![Crc64(u64::MAX); usize::try_from(chunk_count(size_bytes)).unwrap()];
    let meta = CopyMeta {
        path: vec![b'p'; crate::path::MAX_PATH_BYTES],
        xattrs: vec![(b"user.a".to_vec(), vec![0; XATTRS_BYTES_MAX - 6])],
        facts: vec![0; FACTS_BYTES_MAX],
        ..meta()
    };
    let crc = Crc64::combine_all(&chunks, size_bytes).unwrap();
    let copy = SealedCopy { file: FILE, seal: SealNumber(1), size_bytes, crc, chunks, meta };
    assert!(copy.is_lawful());
    assert!(encode(&Request::Keep(copy)).is_ok());
}

#[test]
fn a_message_whose_numbers_disagree_is_refused() {
    let chunks = vec![Crc64(1)];
    let crc = Crc64::combine_all(&chunks, 10).unwrap();
    let good = SealedCopy { file: FILE, seal: SealNumber(1), size_bytes: 10, crc, chunks, meta: meta() };
    assert!(Request::Small(good.clone(), vec![0; 10]).check().is_ok());
    let refused = [
        Request::Small(good.clone(), vec![0; 9]),
        Request::Keep(SealedCopy { size_bytes: CHUNK_BYTES + 1, ..good.clone() }),
        Request::Keep(SealedCopy { crc: Crc64(9), ..good.clone() }),
        Request::Keep(SealedCopy { seal: SealNumber(0), ..good.clone() }),
        Request::Keep(SealedCopy {
            meta: CopyMeta { facts: vec![0; FACTS_BYTES_MAX + 1], ..meta() },
            ..good.clone()
        }),
        Request::Keep(SealedCopy { meta: CopyMeta { path: Vec::new(), ..meta() }, ..good }),
    ];
    for request in refused {
        assert!(matches!(request.check(), Err(MessageError::Unlawful { .. })), "{request:?}");
    }
}

#[test]
fn a_partner_without_room_is_asked_ever_more_rarely_and_says_why() {
    let mut world = World::new();
    world.partner.room = false;
    world.seal();
    world.deliver(false);
    assert!(world.sender.waits_for().unwrap().contains("9 bytes wanted, 1 free"), "{:?}", world.sender);
    let mut asked = 0;
    for _ in 0..600 {
        asked += usize::from(!world.under.is_empty());
        world.deliver(false);
    }
    assert!((5..20).contains(&asked), "asked {asked} times in a minute");
    world.partner.room = true;
    world.rest();
}

/// Goal: a late request does not keep a copy whose bytes a broken push has changed since. Method: the bytes change without a report that
/// they landed; then the old request arrives.
#[test]
fn a_late_request_sees_what_a_broken_push_has_written() {
    let mut world = World::new();
    let keeps = |world: &World| matches!(world.under.last(), Some(Under::Call { ask: Ask::Keep(_), .. }));
    let pushes = |world: &World| matches!(world.under.last(), Some(Under::Push { .. }));
    world.seal();
    while !keeps(&world) {
        world.deliver(false);
    }
    // The same content again is only half of it: the checksum must be known from before.
    world.fail(false);
    while !keeps(&world) {
        world.deliver(false);
    }
    world.happen(7, 0);
    world.happen(3, 55);
    world.seal();
    while !pushes(&world) {
        world.deliver(false);
    }
    world.fail(false);
    while !world.partner.moving.is_empty() {
        world.land_late();
    }
    let late = world.late.len();
    world.late();
    assert_eq!(world.late.len() + 1, late, "the request arrived");
    assert!(!world.partner.copies.contains_key(&SealNumber(1)), "its bytes are gone");
    world.rest();
}

#[test]
fn a_half_received_file_is_kept_for_a_while() {
    let landing = Landing::new(FILE, Holder(Incarnation(1)), Duration::ZERO);
    assert!(!landing.is_stale(LANDING_KEPT - Duration::from_millis(1)));
    assert!(landing.is_stale(LANDING_KEPT));
}

#[test]
fn differentials_go_before_bases_and_what_is_final_before_what_grows() {
    let waiting = |key, priority, sealed, since_ms| Waiting {
        key,
        priority,
        sealed,
        since: Duration::from_millis(since_ms),
    };
    let all = [
        waiting('s', Priority::Scrub, true, 0),
        waiting('a', Priority::Again, true, 1),
        waiting('g', Priority::Base, false, 2),
        waiting('y', Priority::Base, true, 4),
        waiting('b', Priority::Base, true, 3),
        waiting('d', Priority::Differential, false, 9),
    ];
    let mut left = all.to_vec();
    let mut order = String::new();
    while let Some(next) = next_to_send(left.iter().copied()) {
        order.push(next);
        left.retain(|waiting| waiting.key != next);
    }
    assert_eq!(order, "dbygas");
}

#[test]
fn a_checkpoint_is_replicated_before_the_next_one_is_expected() {
    const S: fn(u64) -> Duration = Duration::from_secs;
    let mut rate = Rate::new(S(0));
    let backlog = 100_u64 << 30;
    rate.completed(S(0), backlog);
    assert_eq!(rate.take(S(0), backlog), Duration::ZERO, "no limit while nothing is known");
    rate.completed(S(600), backlog);
    let (mut now, mut sent) = (S(600), 0);
    while sent < backlog {
        now += rate.take(now, MICRO_CHUNK_BYTES);
        sent += MICRO_CHUNK_BYTES;
    }
    assert!(now > S(600 + 250) && now < S(600 + 310), "{now:?}");
    rate.lift();
    assert_eq!(rate.take(now, 1 << 40), Duration::ZERO);
}

#[test]
fn what_goes_while_a_save_is_written_counts_for_the_next_one() {
    const S: fn(u64) -> Duration = Duration::from_secs;
    let (mut rate, save) = (Rate::new(S(0)), 100_u64 << 30);
    let in_time = |bytes: u64| Some(bytes * 1000 / (600 * 500));
    rate.take(S(0), save);
    rate.completed(S(600), 0);
    assert_eq!(rate.bytes_per_s(), None, "no interval is known");
    // Without a limit too: all bytes had gone when the checkpoint was complete.
    rate.take(S(1100), save);
    rate.completed(S(1200), 0);
    assert_eq!(rate.bytes_per_s(), in_time(save));
    // Two fifths went while it was written, and the rest afterwards: the same bytes.
    rate.take(S(1700), save / 5 * 2);
    rate.completed(S(1800), save / 5 * 3);
    assert_eq!(rate.bytes_per_s(), in_time(save));
    rate.take(S(2000), save / 5 * 3);
    rate.take(S(2300), save / 5 * 2);
    rate.completed(S(2400), save / 5 * 3);
    assert_eq!(rate.bytes_per_s(), in_time(save), "what was left of the one before is not this one's");
    // A partner is lost, and its copies are made again beside the next save.
    rate.lift();
    rate.completed(S(3000), 4 * save);
    assert_eq!(rate.bytes_per_s(), in_time(4 * save), "a lift lasts until the next checkpoint");
}

#[test]
fn a_rate_is_never_so_slow_that_a_copy_is_late() {
    const S: fn(u64) -> Duration = Duration::from_secs;
    let mut rate = Rate::new(S(0));
    rate.completed(S(0), 1);
    rate.completed(S(100_000), 1);
    assert_eq!(rate.bytes_per_s(), Some(128 << 20), "of little in a long time");
    rate.completed(S(100_000), 1 << 30);
    assert_eq!(rate.bytes_per_s(), Some((1 << 30) * 1000), "two at once");
    rate.completed(S(100_000), u64::MAX);
    rate.take(S(100_000), u64::MAX);
    rate.completed(S(100_001), u64::MAX);
    assert!(rate.bytes_per_s().is_some(), "what is beyond all numbers does no harm");
}
