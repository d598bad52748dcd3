//! libaio on O_DIRECT files, as DeepSpeed's FastFileWriter uses it. Contains unsafe code (raw system calls).

use crate::site::{Site, pattern};
use std::fs::{self, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

const BLOCK: usize = 1 << 20;
const BLOCKS: usize = 16;

/// `struct iocb` of include/uapi/linux/aio_abi.h, on little-endian machines.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

const IOCB_CMD_PWRITE: u16 = 1;

/// S-direct: "libaio and io_uring work on such files".
#[test]
fn libaio_writes_of_a_direct_file_arrive() {
    let Some(site) = Site::usual() else { return };
    write_with_libaio(&site);
}

pub(crate) fn write_with_libaio(site: &Site) {
    let all = i64::try_from(BLOCKS).unwrap();
    let bytes = pattern(BLOCK * BLOCKS, 5);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(site.path("direct"))
        .unwrap();
    let mut context: libc::c_ulong = 0;
    // SAFETY: io_setup writes the context's number into the one word it is given.
    let made = unsafe { libc::syscall(libc::SYS_io_setup, 32, &raw mut context) };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    let mut requests: Vec<Iocb> = (0..BLOCKS)
        .map(|i| Iocb {
            data: i as u64,
            opcode: IOCB_CMD_PWRITE,
            descriptor: u32::try_from(file.as_raw_fd()).unwrap(),
            buffer: bytes[i * BLOCK..].as_ptr() as u64,
            length: BLOCK as u64,
            offset: i64::try_from(i * BLOCK).unwrap(),
            ..Iocb::default()
        })
        .collect();
    let mut pointers: Vec<*mut Iocb> = requests.iter_mut().map(std::ptr::from_mut).collect();
    // SAFETY: the requests and the bytes they point to live until io_getevents has reported them all.
    let submitted = unsafe { libc::syscall(libc::SYS_io_submit, context, BLOCKS, pointers.as_mut_ptr()) };
    assert_eq!(submitted, all, "{}", std::io::Error::last_os_error());
    let mut events = [IoEvent::default(); BLOCKS];
    let none = std::ptr::null_mut::<libc::timespec>();
    // SAFETY: there is room for as many events as are waited for, and no time-out is read.
    let done =
        unsafe { libc::syscall(libc::SYS_io_getevents, context, BLOCKS, BLOCKS, events.as_mut_ptr(), none) };
    assert_eq!(done, all, "{}", std::io::Error::last_os_error());
    // SAFETY: the context is ours and nothing is in flight.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    assert!(
        events.iter().all(|event| u64::try_from(event.result) == Ok(BLOCK as u64)),
        "{:?}",
        events.map(|e| e.result)
    );
    drop(file);
    assert!(fs::read(site.path("direct")).unwrap() == bytes);
}
