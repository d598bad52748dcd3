//! Tests that the device computes the same as the reference.
//!
//! Owns: the reference's cases on a device, where there is one, and the arithmetic of chunks without one. Does not own: the
//! cases.

use super::super::tests::{agree_in_all_cases, all_settings, bits, cases};
use super::super::{Settings, Values, reference};
use super::launch::{Chunk, chunks};
use super::*;
use crate::cuda::compile::assert_compiles;
use cudarc::driver::DevicePtr;
use std::sync::Arc;

#[test]
fn the_source_compiles_for_the_oldest_and_the_newest_device() {
    assert_compiles(SOURCE);
}

/// Opens the first device; prints why not and returns `None` if there is none.
fn device() -> Option<Arc<Device>> {
    Device::open(0).inspect_err(|why| eprintln!("not run on a device: {why}")).ok()
}

/// Returns the settings except chunks of one element: three launches for each would take seconds.
fn settings() -> Vec<Settings> {
    all_settings().into_iter().filter(|settings| settings.chunk_elements() > 1).collect()
}

fn plain(why: DeviceCompressError) -> CompressError {
    match why {
        DeviceCompressError::Compress(why) => why,
        why => panic!("{why}"),
    }
}

#[test]
fn a_device_agrees_with_the_reference_in_all_cases() {
    let Some(device) = device() else { return };
    agree_in_all_cases(&settings(), &move |values, residual, settings, seed| {
        device.compress(values, residual, settings, seed).map_err(plain)
    });
}

#[test]
fn a_device_adds_as_the_reference_does() {
    let Some(device) = device() else { return };
    for case in cases() {
        for settings in settings() {
            let compressed =
                reference::compress(Values::F32(&case.gradient), None, &settings, 1).expect("finite");
            let (mut expected, mut dense) = (case.residual.clone(), case.residual.clone());
            reference::accumulate(&compressed, -0.3, &mut expected).expect("it fits");
            device.accumulate(&compressed, -0.3, &mut dense).expect("it fits");
            assert_eq!(bits(&dense), bits(&expected), "{}, {settings:?}", case.name);
        }
    }
}

#[test]
fn a_device_refuses_what_is_not_finite_and_changes_nothing() {
    let Some(device) = device() else { return };
    for settings in settings() {
        for bad in [f32::NAN, f32::INFINITY] {
            for index in [0, 1234, 2999] {
                let (mut wrong, mut residual) = (vec![0.5; 3000], vec![0.25; 3000]);
                wrong[index] = bad;
                wrong[2999] = bad;
                let found = device.compress(Values::F32(&wrong), Some(&mut residual), &settings, 1);
                assert_eq!(found, Err(CompressError::NotFinite { index }.into()));
                assert_eq!(residual, vec![0.25; 3000]);
                let found = device.compress(Values::F32(&residual), Some(&mut wrong), &settings, 1);
                assert_eq!(found, Err(CompressError::Residual { index }.into()));
            }
        }
    }
}

/// torch's views may begin anywhere; a result without room changes nothing.
#[test]
fn a_device_takes_addresses_of_others_and_says_how_much_room_it_wants() {
    let Some(device) = device() else { return };
    let _entered = device.enter().expect("it is open");
    let stream = device.context().new_stream().expect("a stream");
    let elements = 5000usize;
    let values: Vec<f32> = (0..=elements).map(|at| ((at * 37 % 101) as f32) * 0.01 - 0.5).collect();
    let residual: Vec<f32> = values.iter().map(|value| value * 0.001).collect();
    let on_device = stream.clone_htod(&values).expect("memory");
    let residual_on_device = stream.clone_htod(&residual).expect("memory");
    let indices = stream.alloc_zeros::<i32>(elements).expect("memory");
    let halves = stream.alloc_zeros::<u16>(elements).expect("memory");
    let settings = Settings::new(0.1, 256, 1000).expect("in range").with_dense_below(0);
    let mut expected_residual = residual[1..].to_vec();
    let expected = reference::compress(Values::F32(&values[1..]), Some(&mut expected_residual), &settings, 4);
    let Ok(super::super::Compressed::Sparse { chunks, .. }) = expected else { panic!("sparse") };
    let kept = chunks[0].indices.len();
    let tensor = DeviceTensor {
        values: DeviceValues::F32(on_device.device_ptr(&stream).0 + 4),
        residual: Some(residual_on_device.device_ptr(&stream).0 + 4),
        elements,
    };
    let out = |capacity| DeviceSparse {
        indices: indices.device_ptr(&stream).0,
        values: halves.device_ptr(&stream).0,
        capacity,
    };
    let run = |capacity| {
        // SAFETY: the tensor begins one element into buffers that have one more; the results have room for all elements; all
        // live until the call returns, and so does the stream.
        unsafe { device.compress_sparse_at(&tensor, &settings, 4, &out(capacity), stream.cu_stream() as u64) }
    };
    assert_eq!(run(kept - 1), Err(DeviceCompressError::Capacity { found: kept, capacity: kept - 1 }));
    assert_eq!(bits(&stream.clone_dtoh(&residual_on_device).expect("a copy")), bits(&residual));
    assert_eq!(run(kept), Ok(vec![kept]));
    let found_residual = stream.clone_dtoh(&residual_on_device).expect("a copy");
    let (found_indices, found_halves) =
        (stream.clone_dtoh(&indices).expect("a copy"), stream.clone_dtoh(&halves).expect("a copy"));
    stream.synchronize().expect("copies");
    assert_eq!(bits(&found_residual[1..]), bits(&expected_residual));
    assert_eq!(found_residual[0].to_bits(), residual[0].to_bits());
    assert_eq!(found_indices[..kept], chunks[0].indices);
    let halves_expected: Vec<u16> = chunks[0].values.iter().map(|value| value.to_bits()).collect();
    assert_eq!(found_halves[..kept], halves_expected);
    assert!(found_indices[kept..].iter().all(|&index| index == 0), "nothing is written beyond");
}

#[test]
fn a_device_does_a_million_elements_of_every_form() {
    let Some(device) = device() else { return };
    let gradient: Vec<f32> =
        (0..3_000_017u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as f32 * 1e-7 - 0.8).collect();
    for settings in [Settings::default(), Settings::default().with_dense_below(usize::MAX)] {
        let (mut expected_residual, mut residual) =
            (vec![0.001; gradient.len()], vec![0.001; gradient.len()]);
        let expected =
            reference::compress(Values::F32(&gradient), Some(&mut expected_residual), &settings, 2);
        let found = device.compress(Values::F32(&gradient), Some(&mut residual), &settings, 2);
        assert!(found.map_err(plain) == expected, "{settings:?}");
        assert!(bits(&residual) == bits(&expected_residual), "{settings:?}: the residual");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_the_device_is_asked() {
    let tensor = DeviceTensor { values: DeviceValues::F32(16), residual: Some(16), elements: 10 };
    let address = |what, address, multiple| Err(DeviceCompressError::Address { what, address, multiple });
    assert_eq!(check_tensor(&tensor), Ok(()));
    assert_eq!(check_tensor(&DeviceTensor { residual: Some(2), ..tensor }), address("the residual", 2, 4));
    let values = DeviceValues::F16(3);
    assert_eq!(check_tensor(&DeviceTensor { values, ..tensor }), address("the gradient", 3, 2));
    let values = DeviceValues::Bf16(0);
    assert_eq!(check_tensor(&DeviceTensor { values, ..tensor }), address("the gradient", 0, 2));
    assert_eq!(check_tensor(&DeviceTensor { values, residual: None, elements: 0 }), Ok(()));
    let int8 = |block| check_int8(&DeviceInt8 { values: 1, scales: 4, block }, 10);
    assert_eq!(int8(256), Ok(()));
    for block in [0, BLOCK_MAX + 1] {
        let why = CompressError::Setting { name: "block", found: block, most: BLOCK_MAX };
        assert_eq!(int8(block), Err(why.into()));
    }
}

#[test]
fn chunks_cover_a_tensor_beyond_32_bits() {
    let len = (1usize << 33) + 12_345;
    for chunk_elements in [CHUNK_ELEMENTS_MAX, 1 << 30, (1 << 30) - 1] {
        let mut next = Chunk { begin: 0, elements: 0, tiles_before: 0, tiles: 0 };
        for chunk in chunks(len, chunk_elements) {
            assert_eq!((chunk.begin, chunk.tiles_before), (next.begin, next.tiles_before));
            assert!(chunk.elements > 0 && chunk.elements <= chunk.tiles * 1024);
            next.begin += chunk.elements;
            next.tiles_before += chunk.tiles;
        }
        assert_eq!(next.begin, len);
    }
    assert_eq!(chunks(0, 5), []);
}
