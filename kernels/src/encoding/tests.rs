//! Tests that every chunk comes back, and that everything else is refused.
//!
//! Owns: chunks like those of training, and hostile ones. Does not own: ratios and speed over whole tensors (`benches/encode.rs`).

use super::*;
use proptest::prelude::*;

/// Longer than the sample, so that the choice and the whole differ.
const LONGEST_BYTES: usize = 200 << 10;

fn round_trip(codec: Codec, chunk: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    Encoder::new().unwrap().encode(codec, chunk, &mut encoded).unwrap();
    assert!(encoded.len() <= chunk.len() + OVERHEAD_BYTES, "{} of {}", encoded.len(), chunk.len());
    let mut decoded = vec![0x55; chunk.len()];
    Decoder::new().unwrap().decode(&encoded, &mut decoded).unwrap();
    assert!(decoded == chunk, "{codec:?} of {} bytes came back otherwise", chunk.len());
    encoded
}

/// A plain generator, so that a failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }

    /// Returns a nearly normal value with deviation 0.02, like a weight.
    fn weight(&mut self) -> f32 {
        let sum: f32 = (0..12).map(|_| f32::from(u16::from_le_bytes([self.byte(), self.byte()]))).sum();
        (sum / 65536.0 - 6.0) * 0.02
    }
}

fn fp32(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..count).flat_map(|_| random.weight().to_le_bytes()).collect()
}

fn bf16(count: usize, seed: u64) -> Vec<u8> {
    fp32(count, seed).chunks(4).flat_map(|element| [element[2], element[3]]).collect()
}

fn noise(count: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..count).map(|_| random.byte()).collect()
}

#[test]
fn weights_shrink_by_their_exponents_and_the_width_is_found() {
    for (bytes, form, most) in [(bf16(100_000, 3), 2, 0.67), (fp32(100_000, 3), 4, 0.84)] {
        let encoded = round_trip(Codec::Planes, &bytes);
        assert_eq!(encoded[0], form);
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let ratio = encoded.len() as f64 / bytes.len() as f64;
        assert!(ratio < most, "{ratio}");
        assert!(encoded.len() < round_trip(Codec::Zstd, &bytes).len(), "better than zstd alone");
    }
}

#[test]
fn noise_stays_as_it_is_and_costs_one_byte() {
    let bytes = noise(LONGEST_BYTES, 9);
    for codec in [Codec::Zstd, Codec::Planes] {
        let encoded = round_trip(codec, &bytes);
        assert_eq!((encoded[0], encoded.len()), (AS_IT_IS, bytes.len() + 1));
    }
}

#[test]
fn text_in_planes_is_left_to_zstd() {
    let text: Vec<u8> =
        (0..20_000).flat_map(|i: u32| format!("layer {} of {i}\n", i % 97).into_bytes()).collect();
    assert_eq!(round_trip(Codec::Planes, &text)[0], ZSTD);
}

#[test]
fn every_short_length_comes_back() {
    for length in 0..70 {
        for codec in [Codec::Zstd, Codec::Planes] {
            round_trip(codec, &noise(length, 7));
            round_trip(codec, &vec![0; length]);
            round_trip(codec, &fp32(40, 5)[..length]);
        }
    }
}

/// Written out, so that a change of the format fails a test.
#[test]
fn the_bytes_of_planes_are_those_of_the_format_note() {
    let encoded = [2, 3, 0, 0, 0x80, 3, 0, 0, 0x80, 0x01, 0x00, 0x02, 0x7f, 0x80, 0x81, 0xee];
    let mut chunk = [0; 7];
    Decoder::new().unwrap().decode(&encoded, &mut chunk).unwrap();
    // 0x7f01, 0x8000 and 0x8102, each turned right by one bit, little-endian; then the odd byte.
    assert_eq!(chunk, [0x80, 0xbf, 0x00, 0x40, 0x81, 0x40, 0xee]);
}

#[test]
fn a_chunk_that_says_too_much_or_too_little_is_refused() {
    let bytes = bf16(50_001, 11);
    let decode =
        |encoded: &[u8], length: usize| Decoder::new().unwrap().decode(encoded, &mut vec![0; length]);
    for codec in [Codec::Zstd, Codec::Planes] {
        let encoded = round_trip(codec, &bytes);
        for length in [0, 1, bytes.len() - 1, bytes.len() + 1, bytes.len() * 2] {
            assert!(decode(&encoded, length).is_err(), "{codec:?} as {length} bytes");
        }
        for end in (0..encoded.len()).step_by(997).chain(0..20).chain([encoded.len() - 1]) {
            assert!(decode(&encoded[..end], bytes.len()).is_err(), "{codec:?} cut at {end}");
        }
        let longer = [&encoded[..], &[0]].concat();
        assert!(decode(&longer, bytes.len()).is_err());
    }
    assert_eq!(decode(&[], 0), Err(DecodeError::Empty));
    assert_eq!(decode(&[3, 0, 0], 2), Err(DecodeError::Form(3)));
    assert_eq!(decode(&[0, 1, 2], 3), Err(DecodeError::Length { found: 2, expected: 3 }));
    // Planes that claim 2 GiB each, as they are and as frames.
    for claim in [u32::MAX, u32::MAX >> 1] {
        let hostile = [&[2][..], &claim.to_le_bytes(), &claim.to_le_bytes(), &[0; 8]].concat();
        assert!(matches!(decode(&hostile, 8), Err(DecodeError::Short { .. })));
    }
    // A frame that claims 1 TiB of zeros.
    let bomb =
        [&[ZSTD][..], &[0x28, 0xb5, 0x2f, 0xfd, 0xe0], &(1_u64 << 40).to_le_bytes(), &[3, 0, 0, 0]].concat();
    assert!(matches!(decode(&bomb, 8 << 20), Err(DecodeError::Frame(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_encoded_comes_back(
        seed: u64, kind in 0..5, length in 0..LONGEST_BYTES, skip in 0..4_usize, planes: bool,
    ) {
        let elements = length / 2 + 4;
        let bytes = match kind {
            0 => noise(length + skip, seed),
            1 => vec![seed.to_le_bytes()[0]; length + skip],
            2 => fp32(elements / 2 + 2, seed),
            // Half weights, half something else: a chunk in which one tensor ends.
            3 => [bf16(elements / 2, seed), noise(elements, seed)].concat(),
            _ => bf16(elements, seed),
        };
        round_trip(if planes { Codec::Planes } else { Codec::Zstd }, &bytes[skip..]);
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(bytes: Vec<u8>, form in 0..6_u8, length in 0..4096_usize) {
        let encoded = [&[form][..], &bytes].concat();
        let _ = Decoder::new().unwrap().decode(&encoded, &mut vec![0; length]);
    }

    #[test]
    fn a_flipped_byte_is_refused_or_makes_other_bytes_and_never_more(
        seed: u64, at in any::<prop::sample::Index>(), flip in 1..=255_u8, planes: bool,
    ) {
        let bytes = bf16(3000, seed);
        let mut encoded = round_trip(if planes { Codec::Planes } else { Codec::Zstd }, &bytes);
        let at = at.index(encoded.len());
        encoded[at] ^= flip;
        // Beyond the chunk nothing may change, whatever the bytes say.
        let mut room = vec![0xaa; bytes.len() + 64];
        let _ = Decoder::new().unwrap().decode(&encoded, &mut room[..bytes.len()]);
        prop_assert!(room[bytes.len()..].iter().all(|byte| *byte == 0xaa));
    }
}
