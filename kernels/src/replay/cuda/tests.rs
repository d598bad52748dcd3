//! Tests that the device computes the same as the reference, and that addresses are right beyond 2³¹ elements.
//!
//! Owns: the reference's cases on a device, where there is one, and the address arithmetic without one. Does not own: the
//! cases.

use super::super::tests::{Copy16, Owned, Random, case, expected, with_steps};
use super::super::{Gradient, GradientStep};
use super::args::TABLE_ENTRIES_MAX;
use super::*;
use crate::cuda::compile::assert_compiles;
use cudarc::driver::CudaSlice;

#[test]
fn the_source_compiles_for_the_oldest_and_the_newest_device() {
    assert_compiles(SOURCE);
}

/// Opens the first device; prints why not and returns `None` if there is none.
fn device() -> Option<Arc<Device>> {
    Device::open(0).inspect_err(|why| eprintln!("not run on a device: {why}")).ok()
}

fn device_agrees(device: &Device, elements: usize, count: usize, seed: u64, odd: bool) {
    let (state, steps, copy) = case(elements, count, seed, odd);
    let expected = expected(&state, &steps, copy);
    let mut found = state;
    with_steps(&steps, |steps| device.replay(&mut found.state(copy), steps)).unwrap();
    found.assert_same(&expected, &format!("{}: {elements} elements, seed {seed}", device.name()));
}

/// Every length near a tile's and a vector's, and lengths of many tiles; every kind of step and gradient.
#[test]
fn a_device_agrees_with_the_reference_bit_for_bit() {
    let Some(device) = device() else { return };
    for elements in (0..40).chain([255, 256, 257, 1000, 1023, 1024, 1025, 2047, 2048, 4099]) {
        for odd in [false, true] {
            let seed = 31 + elements as u64;
            device_agrees(&device, elements, 7, seed, odd);
        }
    }
    for seed in 0..200 {
        device_agrees(&device, 3000 + usize::try_from(seed).unwrap() * 17, 6, seed, seed % 2 == 0);
    }
    device_agrees(&device, 300_001, 6, 11, false);
    device_agrees(&device, 2000, 100, 12, false);
    // More tiles than blocks are launched.
    for seed in 300..304 {
        device_agrees(&device, 5_000_003, 5, seed, false);
    }
}

/// torch's views may begin anywhere: one element further, no load of four elements is aligned.
#[test]
fn a_device_takes_addresses_that_are_aligned_for_one_element_only() {
    let Some(device) = device() else { return };
    let _entered = device.enter().unwrap();
    let stream = device.context().new_stream().unwrap();
    let elements = 5000;
    let before = Owned::new(elements + 1, &mut Random::new(5), false);
    let gradients: Vec<f32> = (0..=elements).map(|at| (at % 97) as f32 * 0.01 - 0.5).collect();
    let [weights, exp_avg, exp_avg_sq] =
        [0, 1, 2].map(|slice| stream.clone_htod(&before.slices[slice]).unwrap());
    let values = stream.clone_htod(&gradients).unwrap();
    let copy = stream.alloc_zeros::<u16>(elements + 1).unwrap();
    let at = |slice: &CudaSlice<f32>| slice.device_ptr(&stream).0 + 4;
    let state = DeviceState {
        weights: at(&weights),
        exp_avg: at(&exp_avg),
        exp_avg_sq: at(&exp_avg_sq),
        half: DeviceHalf::Bf16(copy.device_ptr(&stream).0 + 2),
        elements,
    };
    let step = DeviceGradientStep { step: Step::adamw(1), gradient: DeviceGradient::F32(at(&values)) };
    // SAFETY: each buffer has one element more than is named, they are all different, and they live until the stream is done.
    unsafe { device.replay_at(&state, &[step; 1], stream.cu_stream() as u64) }.unwrap();
    let mut found = before.clone();
    for (slice, buffer) in [&weights, &exp_avg, &exp_avg_sq].into_iter().enumerate() {
        found.slices[slice] = stream.clone_dtoh(buffer).unwrap();
    }
    let copied = stream.clone_dtoh(&copy).unwrap();
    stream.synchronize().unwrap();
    let mut expected = before.clone();
    let [weights, exp_avg, exp_avg_sq] = expected.slices.each_mut().map(|slice| &mut slice[1..]);
    let mut state = super::super::State {
        weights,
        exp_avg,
        exp_avg_sq,
        half: super::super::HalfCopy::Bf16(&mut expected.bf16[1..]),
    };
    let steps = [GradientStep { step: Step::adamw(1), gradient: Gradient::F32(&gradients[1..]) }];
    super::super::reference::replay(&mut state, &steps).unwrap();
    found.bf16 = copied.into_iter().map(half::bf16::from_bits).collect();
    found.assert_same(&expected, "unaligned");
}

#[test]
fn what_does_not_fit_is_refused_before_the_device_is_asked() {
    let state =
        DeviceState { weights: 16, exp_avg: 16, exp_avg_sq: 16, half: DeviceHalf::None, elements: 10 };
    fn step(gradient: DeviceGradient<'_>) -> [DeviceGradientStep<'_>; 1] {
        [DeviceGradientStep { step: Step::adam(1), gradient }]
    }
    let refused =
        |state: &DeviceState, gradient| checked(state, &step(gradient)).expect_err("it does not fit");
    let address = |what, address, multiple| DeviceReplayError::Address { what, address, multiple };
    let good = DeviceGradient::F32(16);
    assert!(checked(&state, &step(good)).is_ok());
    assert_eq!(refused(&DeviceState { weights: 0, ..state }, good), address("the weights", 0, 4));
    assert_eq!(refused(&DeviceState { exp_avg: 6, ..state }, good), address("exp_avg", 6, 4));
    assert_eq!(
        refused(&DeviceState { half: DeviceHalf::F16(3), ..state }, good),
        address("the half copy", 3, 2)
    );
    assert_eq!(refused(&state, DeviceGradient::Bf16(1)), address("a gradient", 1, 2));
    fn sparse(chunks: &[DeviceSparseChunk]) -> DeviceGradient<'_> {
        DeviceGradient::Sparse { chunk_elements: 6, chunks }
    }
    let chunk = |entries, indices| DeviceSparseChunk { indices, values: 2, entries };
    assert!(checked(&state, &step(sparse(&[chunk(6, 4), chunk(0, 0)]))).is_ok());
    let long = [chunk(6, 4), chunk(5, 4)];
    assert_eq!(
        refused(&state, sparse(&long)),
        ReplayError::GradientLength { step: 0, what: "entries of a chunk", found: 5, expected: 4 }.into()
    );
    let uneven = [chunk(6, 2), chunk(0, 0)];
    assert_eq!(refused(&state, sparse(&uneven)), address("a gradient's indices", 2, 4));
    assert!(
        checked(
            &state,
            &[DeviceGradientStep {
                step: Step { skipped: true, ..Step::adam(1) },
                gradient: DeviceGradient::F32(1)
            }]
        )
        .is_ok()
    );
}

#[test]
fn parts_cross_no_chunk_and_addresses_go_beyond_32_bits() {
    let elements = (1usize << 33) + 12_345;
    let factors = Step::adam(1).factors(0).unwrap();
    let chunk = |number: u64| DeviceSparseChunk { indices: number << 40, values: number << 41, entries: 7 };
    let chunks: Vec<_> = (1..=5).map(chunk).collect();
    let odd_chunks: Vec<_> = (1..=9).map(chunk).collect();
    let odd_elements = (1usize << 30) - 1;
    let steps = [
        (factors, DeviceGradient::F32(1 << 50)),
        (factors, DeviceGradient::Sparse { chunk_elements: CHUNK_ELEMENTS_MAX, chunks: &chunks }),
        (factors, DeviceGradient::Sparse { chunk_elements: odd_elements, chunks: &odd_chunks }),
        (factors, DeviceGradient::Int8 { values: 1 << 51, scales: 1 << 52, block: 256 }),
    ];
    let mut next = 0;
    for part in parts(elements, &steps) {
        assert_eq!(part.begin, next);
        assert!(part.elements > 0 && 2 * (part.tiles() + 1) <= TABLE_ENTRIES_MAX);
        next += part.elements;
        let args = steps.map(|step| step_args(&step, part, 64));
        assert_eq!(args[0].values, (1 << 50) + 4 * part.begin as u64);
        for (args, size, chunks) in
            [(args[1], CHUNK_ELEMENTS_MAX, &chunks), (args[2], odd_elements, &odd_chunks)]
        {
            let number = part.begin / size;
            assert_eq!((next - 1) / size, number, "a part is within a chunk");
            assert_eq!((args.beside, args.values), (chunks[number].indices, chunks[number].values));
            assert_eq!(args.first, (part.begin - number * size) as u64);
        }
        assert_eq!((args[3].values, args[3].beside), ((1 << 51) + part.begin as u64, 1 << 52));
        assert_eq!((args[3].first, args[3].shift), (part.begin as u64, 8));
    }
    assert_eq!(next, elements);
    assert_eq!(parts(0, &steps).count(), 0);
    assert_eq!(size_of::<StepArgs>(), 88, "as replay.cu has it");
    let many = [steps[1]; super::super::STEPS_MAX];
    let first = parts(elements, &many).next().unwrap();
    assert!(many.len() * (first.tiles() + 1) <= TABLE_ENTRIES_MAX);
}

#[test]
fn the_copy_of_nothing_stays_nothing() {
    let Some(device) = device() else { return };
    let mut empty = Owned::new(0, &mut Random::new(1), false);
    device.replay(&mut empty.state(Copy16::F16), &[]).unwrap();
}
