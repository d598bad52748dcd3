//! Tests that all back ends compute the same as the reference, and that the reference is right.
//!
//! Owns: the cases for every back end, the device's too. Does not own: timed tests.

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;

/// A plain generator, so that a failure can be repeated from its seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a value from -1 to 1, most of them small.
    fn small(&mut self) -> f32 {
        let uniform = |bits: u64| f32::from(u16::try_from(bits & 0xffff).expect("16 bits")) / 65536.0 - 0.5;
        let bits = self.next();
        8.0 * uniform(bits) * uniform(bits >> 16) * uniform(bits >> 32)
    }

    /// Returns any finite value at all.
    fn any_finite(&mut self) -> f32 {
        let value = f32::from_bits(u32::try_from(self.next() >> 32).expect("32 bits"));
        if value.is_finite() { value } else { 1e-42 }
    }
}

/// A gradient and a residual.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) gradient: Vec<f32>,
    pub(super) residual: Vec<f32>,
}

/// Returns the kinds of values that gradients and residuals have, at lengths about the sizes of blocks, warps and pieces.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, len: usize, value: &mut dyn FnMut(&mut Random) -> f32, residual: f32| {
        let mut random = Random::new(len as u64 + 7);
        let gradient: Vec<f32> = (0..len).map(|_| value(&mut random)).collect();
        let residual = (0..len).map(|_| residual * random.small()).collect();
        cases.push(Case { name: format!("{name}, {len} elements"), gradient, residual });
    };
    for len in [0, 1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 5000] {
        add("small", len, &mut Random::small, 0.01);
    }
    // More than one piece of a thread.
    add("small", 270_001, &mut Random::small, 0.01);
    for len in [1, 700, 4097] {
        add("any bits", len, &mut Random::any_finite, 1.0);
        add("zeros", len, &mut |_| 0.0, 0.0);
        add("negative zeros", len, &mut |_| -0.0, 0.0);
        add("all equal", len, &mut |_| -0.25, 0.0);
        add("f16 subnormal", len, &mut |random| random.small() * 1e-6, 1e-7);
        add("f32 subnormal", len, &mut |random| random.small() * 1e-39, 1e-40);
        add("beyond f16", len, &mut |random| random.small() * 1e6, 1.0);
        add("about f16's end", len, &mut |random| 65_504.0 + 32.0 * random.small(), 1.0);
        add("largest", len, &mut |random| if random.small() > 0.0 { f32::MAX } else { f32::MIN }, 0.0);
        add("tiny blocks", len, &mut |random| random.small() * 1e-43, 0.0);
        let mut place = 0;
        add(
            "one row",
            len,
            &mut |random| {
                place += 1;
                if place % 700 < 20 { random.small() } else { 0.0 }
            },
            0.0,
        );
    }
    cases
}

/// Returns settings that reach every path on small tensors: dense and sparse, odd blocks, samples of all and of few, many chunks.
pub(super) fn all_settings() -> Vec<Settings> {
    let new = |ratio, block, sample| Settings::new(ratio, block, sample).expect("in range");
    let sparse = |settings: Settings, chunk| {
        settings.with_dense_below(0).with_chunk_elements(chunk).expect("in range")
    };
    vec![
        Settings::default(),
        new(1.0, 1, 1).with_dense_below(usize::MAX),
        new(0.5, 100, 64).with_dense_below(usize::MAX),
        new(0.1, BLOCK_MAX, 64).with_dense_below(usize::MAX),
        sparse(Settings::default(), CHUNK_ELEMENTS_MAX),
        sparse(new(0.01, 256, 100), 1000),
        sparse(new(0.3, 256, 33), 1),
        sparse(new(1.0, 256, 1), 1024),
        sparse(new(1e-300, 256, 1 << 20), 2049),
    ]
    .into_iter()
    .collect()
}

/// Returns the same gradient as 16-bit floats, as far as these are finite.
pub(super) fn halves(gradient: &[f32]) -> (Vec<bf16>, Vec<f16>) {
    let bf16s = gradient.iter().map(|&value| bf16::from_f32(value.clamp(-3e38, 3e38))).collect();
    let f16s = gradient.iter().map(|&value| f16::from_f32(value.clamp(-65_504.0, 65_504.0))).collect();
    (bf16s, f16s)
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Compares bit for bit: `==` has 0 equal to -0.
pub(super) fn same(found: &Compressed, expected: &Compressed) -> bool {
    let scales = |compressed: &Compressed| match compressed {
        Compressed::Int8 { scales, .. } => bits(scales),
        Compressed::Sparse { chunks, .. } => {
            chunks.iter().flat_map(|chunk| &chunk.values).map(|value| u32::from(value.to_bits())).collect()
        }
    };
    found == expected && scales(found) == scales(expected)
}

/// A back end's compression: values, residual, settings, seed.
pub(super) type Run =
    dyn Fn(Values<'_>, Option<&mut [f32]>, &Settings, u64) -> Result<Compressed, CompressError>;

/// Checks `run` against the reference, for every case in every kind of values.
pub(super) fn agree_in_all_cases(settings: &[Settings], run: &Run) {
    for case in cases() {
        let (bf16s, f16s) = halves(&case.gradient);
        for settings in settings {
            if case.gradient.len() > 5000 && !(settings == &Settings::default()) {
                continue;
            }
            for (kind, values) in [
                ("f32", Values::F32(&case.gradient)),
                ("bf16", Values::Bf16(&bf16s)),
                ("f16", Values::F16(&f16s)),
            ] {
                let what = format!("{}, {kind}, {settings:?}", case.name);
                let expected = reference::compress(values, None, settings, 5).expect(&what);
                let found = run(values, None, settings, 5).expect(&what);
                assert!(same(&found, &expected), "{what}");

                let (mut expected_residual, mut residual) = (case.residual.clone(), case.residual.clone());
                let expected = reference::compress(values, Some(&mut expected_residual), settings, 6);
                let found = run(values, Some(&mut residual), settings, 6);
                match (&expected, &found) {
                    (Ok(expected), Ok(found)) => {
                        assert!(same(found, expected), "{what}, with a residual");
                        assert_eq!(bits(&residual), bits(&expected_residual), "{what}: the residual");
                    }
                    _ => assert_eq!(found, expected, "{what}, with a residual"),
                }
            }
        }
    }
}

#[test]
fn quantised_values_are_within_half_a_scale() {
    for case in cases() {
        let settings = Settings::default().with_dense_below(usize::MAX);
        let compressed =
            reference::compress(Values::F32(&case.gradient), None, &settings, 0).expect("finite");
        let Compressed::Int8 { scales, .. } = &compressed else { panic!("dense") };
        let mut dense = vec![0.0; case.gradient.len()];
        reference::accumulate(&compressed, 1.0, &mut dense).expect("it fits");
        for (index, (found, expected)) in dense.iter().zip(&case.gradient).enumerate() {
            let scale = scales[index / BLOCK_DEFAULT];
            let bound = f64::from(scale) * 0.5001 + 1e-43;
            let off = (f64::from(*found) - f64::from(*expected)).abs();
            assert!(off <= bound, "{}: {expected} became {found}, scale {scale}", case.name);
            assert!(found.is_finite());
        }
    }
}

#[test]
fn a_sample_of_all_finds_the_largest() {
    let gradient: Vec<f32> = (0..1000u16).map(|value| f32::from(value * 37 % 1000) * -0.5).collect();
    let settings = Settings::new(0.01, 256, 1000).expect("in range").with_dense_below(0);
    let Ok(Compressed::Sparse { chunks, .. }) =
        reference::compress(Values::F32(&gradient), None, &settings, 3)
    else {
        panic!("sparse")
    };
    assert_eq!(chunks[0].indices.len(), 10);
    for (&index, value) in chunks[0].indices.iter().zip(&chunks[0].values) {
        assert_eq!(value.to_f32(), gradient[usize::try_from(index).expect("from 0")]);
        assert!(value.to_f32() <= -0.5 * 990.0);
    }
}

#[test]
fn about_one_in_a_hundred_is_kept_and_the_seed_decides_which_are_looked_at() {
    let mut random = Random::new(1);
    let gradient: Vec<f32> = (0..1 << 20).map(|_| random.small()).collect();
    let kept: Vec<usize> = (0..8)
        .map(|seed| {
            compress(Values::F32(&gradient), None, &Settings::default(), seed, 2).expect("finite").kept()
        })
        .collect();
    assert!(kept.iter().all(|kept| (7000..14000).contains(kept)), "{kept:?}");
    assert!(kept.windows(2).any(|pair| pair[0] != pair[1]), "{kept:?}");
}

#[test]
fn values_that_f16_cannot_hold_are_saturated_or_left_out_and_the_residual_has_them() {
    let least = f32::from_bits(LEAST_KEPT_BITS);
    let gradient = [1e30, -70_000.0, 65_519.0, least, 2f32.powi(-25), 0.0, -0.0];
    let mut residual = [0.0; 7];
    let settings = Settings::new(1.0, 1, 64).expect("in range").with_dense_below(0);
    let Ok(Compressed::Sparse { chunks, .. }) =
        reference::compress(Values::F32(&gradient), Some(&mut residual), &settings, 0)
    else {
        panic!("sparse")
    };
    assert_eq!(chunks[0].indices, [0, 1, 2, 3]);
    let values: Vec<f32> = chunks[0].values.iter().map(|value| value.to_f32()).collect();
    assert_eq!(values, [65_504.0, -65_504.0, 65_504.0, 2f32.powi(-24)]);
    assert_eq!(residual, [1e30, -4496.0, 15.0, least - 2f32.powi(-24), 2f32.powi(-25), 0.0, 0.0]);
}

#[test]
fn a_gradient_that_is_not_finite_is_refused_and_nothing_changes() {
    for settings in all_settings() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for index in [0, 700, 2999] {
                let mut gradient = vec![0.5; 3000];
                gradient[index] = bad;
                gradient[2999] = bad;
                let (bf16s, f16s): (Vec<bf16>, Vec<f16>) =
                    gradient.iter().map(|&value| (bf16::from_f32(value), f16::from_f32(value))).unzip();
                for values in [Values::F32(&gradient), Values::Bf16(&bf16s), Values::F16(&f16s)] {
                    let refused = Err(CompressError::NotFinite { index });
                    let mut residual = vec![0.25; 3000];
                    assert_eq!(reference::compress(values, Some(&mut residual), &settings, 1), refused);
                    for backend in CpuBackend::all_here() {
                        assert_eq!(compress_with(backend, values, None, &settings, 1, 2), refused);
                        let with = compress_with(backend, values, Some(&mut residual), &settings, 1, 2);
                        assert_eq!(with, refused);
                    }
                    assert_eq!(residual, vec![0.25; 3000]);
                }
            }
        }
    }
}

#[test]
fn a_residual_that_is_of_no_use_is_refused() {
    let gradient = vec![f32::MAX; 3000];
    for settings in all_settings() {
        for bad in [f32::NAN, f32::NEG_INFINITY, f32::MAX] {
            for index in [0, 1234, 2999] {
                let mut residual = vec![0.0; 3000];
                residual[index] = bad;
                residual[2999] = bad;
                let refused = Err(CompressError::Residual { index });
                let mut copy = residual.clone();
                let found = reference::compress(Values::F32(&gradient), Some(&mut copy), &settings, 1);
                assert_eq!(found, refused);
                for backend in CpuBackend::all_here() {
                    let mut copy = residual.clone();
                    let found =
                        compress_with(backend, Values::F32(&gradient), Some(&mut copy), &settings, 1, 2);
                    assert_eq!(found, refused, "{backend:?} {settings:?}");
                }
            }
        }
    }
}

#[test]
fn error_feedback_lets_everything_through_in_time() {
    let mut random = Random::new(9);
    let gradient: Vec<f32> = (0..2000).map(|_| random.small()).collect();
    for settings in
        [Settings::default(), Settings::new(0.05, 256, 2000).expect("in range").with_dense_below(0)]
    {
        let mut residual = vec![0.0; gradient.len()];
        let mut sum = vec![0.0; gradient.len()];
        for step in 0..200 {
            let compressed =
                compress(Values::F32(&gradient), Some(&mut residual), &settings, step, 1).expect("finite");
            accumulate(&compressed, 1.0 / 200.0, &mut sum, 1).expect("it fits");
        }
        let off: f32 =
            sum.iter().zip(&gradient).map(|(sum, gradient)| (sum - gradient).abs()).fold(0.0, f32::max);
        assert!(off < 0.02, "{off}");
    }
}

#[test]
fn what_comes_from_elsewhere_is_checked() {
    let chunk = |begin, indices: &[i32], values: usize| SparseChunk {
        begin,
        indices: indices.to_vec(),
        values: vec![f16::ONE; values],
    };
    let sparse = |chunks| Compressed::Sparse { len: 10, chunk_elements: 6, chunks };
    let int8 = |scales: usize, values: usize, block| Compressed::Int8 {
        len: 10,
        block,
        scales: vec![1.0; scales],
        values: vec![1; values],
    };
    let fine = [sparse(vec![chunk(0, &[0, 5], 2), chunk(6, &[3], 1)]), int8(3, 10, 4)];
    let length = |what, found, expected| CompressError::Length { what, found, expected };
    let index =
        |chunk, entry, found, least, elements| CompressError::Index { chunk, entry, found, least, elements };
    let wrong = [
        (sparse(vec![chunk(0, &[0], 1)]), length("the list of chunks", 1, 2)),
        (sparse(vec![chunk(0, &[0, 1], 1), chunk(6, &[], 0)]), length("a chunk's values", 1, 2)),
        (sparse(vec![chunk(0, &[6], 1), chunk(6, &[], 0)]), index(0, 0, 6, 0, 6)),
        (sparse(vec![chunk(0, &[], 0), chunk(6, &[4], 1)]), index(1, 0, 4, 0, 4)),
        (sparse(vec![chunk(0, &[-1], 1), chunk(6, &[], 0)]), index(0, 0, -1, 0, 6)),
        (sparse(vec![chunk(0, &[2, 2], 2), chunk(6, &[], 0)]), index(0, 1, 2, 3, 6)),
        (
            sparse(vec![chunk(0, &[], 0), chunk(5, &[], 0)]),
            CompressError::Begin { chunk: 1, found: 5, expected: 6 },
        ),
        (int8(2, 10, 4), length("the scales", 2, 3)),
        (int8(3, 9, 4), length("the values", 9, 10)),
        (int8(3, 10, 0), CompressError::Setting { name: "block", found: 0, most: BLOCK_MAX }),
        (
            Compressed::Sparse { len: 10, chunk_elements: 0, chunks: Vec::new() },
            CompressError::Setting { name: "chunk_elements", found: 0, most: CHUNK_ELEMENTS_MAX },
        ),
    ];
    for compressed in &fine {
        for len in [9, 11] {
            let found = accumulate(compressed, 1.0, &mut vec![0.0; len], 2);
            assert_eq!(found, Err(length("the dense tensor", len, 10)));
        }
        assert_eq!(accumulate(compressed, 1.0, &mut [0.0; 10], 2), Ok(()));
    }
    for (compressed, why) in wrong {
        let mut dense = [0.5; 10];
        assert_eq!(accumulate(&compressed, 1.0, &mut dense, 2), Err(why.clone()));
        assert_eq!(reference::accumulate(&compressed, 1.0, &mut dense), Err(why.clone()));
        assert_eq!(dense, [0.5; 10]);
        assert!(!why.to_string().is_empty());
    }
}

#[test]
fn settings_and_lengths_out_of_range_are_refused() {
    for ratio in [0.0, -1.0, 1.000_001, f64::NAN, f64::INFINITY] {
        assert!(matches!(Settings::new(ratio, 1, 1), Err(CompressError::Ratio { .. })));
    }
    for (block, sample, name) in
        [(0, 1, "block"), (BLOCK_MAX + 1, 1, "block"), (1, 0, "sample"), (1, SAMPLE_MAX + 1, "sample")]
    {
        let Err(CompressError::Setting { name: found, .. }) = Settings::new(0.5, block, sample) else {
            panic!("{name} is refused")
        };
        assert_eq!(found, name);
    }
    for chunk in [0, CHUNK_ELEMENTS_MAX + 1] {
        assert!(Settings::default().with_chunk_elements(chunk).is_err());
    }
    let wrong = Err(CompressError::Length { what: "the residual", found: 3, expected: 2 });
    let values = Values::F32(&[1.0, 2.0]);
    assert_eq!(compress(values, Some(&mut [0.0; 3]), &Settings::default(), 0, 1), wrong);
    assert_eq!(reference::compress(values, Some(&mut [0.0; 3]), &Settings::default(), 0), wrong);
}

#[test]
fn a_sample_looks_once_at_each_stratum() {
    for (len, sample) in
        [(0, 5), (1, 5), (5, 5), (6, 5), (9, 5), (11, 5), (1_000_003, 1024), (usize::MAX / 2, 16)]
    {
        let settings = Settings::new(0.01, 1, sample).expect("in range");
        for seed in [0, 1, u64::MAX] {
            let found = sample::Sample::of(len, &settings, seed);
            assert!(found.count <= sample && (found.count > 0) == (len > 0), "{found:?}");
            for stratum in 0..found.count {
                let place = found.place(stratum);
                assert!(place < len && place / found.stride == stratum, "{found:?}: {place}");
            }
        }
    }
}

#[test]
fn back_ends_agree_with_the_reference_in_all_cases() {
    for backend in CpuBackend::all_here() {
        for threads in [1, 3] {
            agree_in_all_cases(&all_settings(), &move |values, residual, settings, seed| {
                compress_with(backend, values, residual, settings, seed, threads)
            });
        }
    }
}

#[test]
fn back_ends_add_as_the_reference_does() {
    for case in cases() {
        for settings in all_settings() {
            let compressed = compress(Values::F32(&case.gradient), None, &settings, 1, 1).expect("finite");
            let mut expected = case.residual.clone();
            reference::accumulate(&compressed, -0.3, &mut expected).expect("it fits");
            for backend in CpuBackend::all_here() {
                let mut dense = case.residual.clone();
                accumulate_with(backend, &compressed, -0.3, &mut dense, 3).expect("it fits");
                assert_eq!(bits(&dense), bits(&expected), "{}, {settings:?}, {backend:?}", case.name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn lengths_blocks_chunks_and_threads_do_not_matter(
        len in 0usize..6000,
        ratio in 0.001f64..1.0,
        block in 1usize..600,
        sample in 1usize..3000,
        chunk in 1usize..4000,
        dense in any::<bool>(),
        threads in 0usize..5,
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        let gradient: Vec<f32> = (0..len).map(|_| random.small()).collect();
        let settings = Settings::new(ratio, block, sample)
            .and_then(|settings| settings.with_chunk_elements(chunk))
            .expect("in range")
            .with_dense_below(if dense { usize::MAX } else { 0 });
        let mut expected_residual: Vec<f32> = gradient.iter().rev().map(|value| value * 0.1).collect();
        let mut residual = expected_residual.clone();
        let expected = reference::compress(Values::F32(&gradient), Some(&mut expected_residual), &settings, seed);
        let found = compress(Values::F32(&gradient), Some(&mut residual), &settings, seed, threads);
        prop_assert_eq!(&found, &expected);
        prop_assert_eq!(bits(&residual), bits(&expected_residual));
        prop_assert_eq!(found.expect("finite").check(), Ok(()));
    }
}
