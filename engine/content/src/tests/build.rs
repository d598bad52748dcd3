//! Small files of each format, byte by byte.
//!
//! Owns: the output of a correct writer. Does not own: changes to it.

/// An archive that is being written.
#[derive(Default)]
pub(super) struct Zip {
    pub(super) bytes: Vec<u8>,
    directory: Vec<u8>,
    entries: u16,
}

impl Zip {
    /// Adds a member as it is, with an extra field in its own header.
    pub(super) fn add(&mut self, name: &str, extra: &[u8], data: &[u8]) {
        self.entry(name, extra, data, data.len());
    }

    /// Adds a member whose directory entry gives another size.
    pub(super) fn entry(&mut self, name: &str, extra: &[u8], data: &[u8], size: usize) {
        let (at, size) = (u32::try_from(self.bytes.len()).unwrap(), u32::try_from(size).unwrap());
        let name_bytes = u16::try_from(name.len()).unwrap().to_le_bytes();
        let extra_bytes = u16::try_from(extra.len()).unwrap().to_le_bytes();
        // Version, flags, method, time, date, CRC: readers ignore these.
        let common =
            [&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &size.to_le_bytes(), &size.to_le_bytes()]
                .concat();
        self.bytes.extend(
            [&b"PK\x03\x04"[..], &common, &name_bytes, &extra_bytes, name.as_bytes(), extra, data].concat(),
        );
        let rest = [&name_bytes[..], &[0; 12], &at.to_le_bytes(), name.as_bytes()].concat();
        self.directory.extend([&b"PK\x01\x02\x14\x00"[..], &common, &rest].concat());
        self.entries += 1;
    }

    pub(super) fn end(mut self) -> Vec<u8> {
        let at = u32::try_from(self.bytes.len()).unwrap().to_le_bytes();
        let length = u32::try_from(self.directory.len()).unwrap().to_le_bytes();
        let entries = self.entries.to_le_bytes();
        self.bytes.append(&mut self.directory);
        self.bytes.extend([&b"PK\x05\x06\0\0\0\0"[..], &entries, &entries, &length, &at, &[0, 0]].concat());
        self.bytes
    }

    /// Ends the archive with the wide records that torch writes, and all narrow fields in use.
    pub(super) fn end_wide(mut self) -> Vec<u8> {
        let at = (self.bytes.len() as u64).to_le_bytes();
        let length = (self.directory.len() as u64).to_le_bytes();
        let entries = u64::from(self.entries).to_le_bytes();
        self.bytes.append(&mut self.directory);
        let wide_at = (self.bytes.len() as u64).to_le_bytes();
        let record = [&44_u64.to_le_bytes()[..], &[0; 12], &entries, &entries, &length, &at].concat();
        self.bytes.extend([b"PK\x06\x06", &record[..]].concat());
        self.bytes.extend([&b"PK\x06\x07\0\0\0\0"[..], &wide_at, &[1, 0, 0, 0]].concat());
        self.bytes.extend([&b"PK\x05\x06\0\0\0\0"[..], &[0xff; 12], &[0, 0]].concat());
        self.bytes
    }
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat()
}

/// Makes a persistent id as torch pickles it, without a memo.
pub(super) fn id(class: &str, key: &str, count: u32) -> Vec<u8> {
    let class = format!("ctorch\n{class}\n");
    [
        b"(",
        &text("storage")[..],
        class.as_bytes(),
        &text(key),
        &text("cpu"),
        b"J",
        &count.to_le_bytes(),
        b"tQ",
    ]
    .concat()
}

/// Makes the pickle of a list of storages of `FloatStorage`: keys and bytes.
pub(super) fn pickle(storages: &[(u64, usize)]) -> Vec<u8> {
    let ids = storages
        .iter()
        .map(|(key, bytes)| id("FloatStorage", &key.to_string(), u32::try_from(bytes / 4).unwrap()));
    [&b"\x80\x02]q\0("[..], &ids.collect::<Vec<_>>().concat(), b"e."].concat()
}

/// Padding of the first members in torch's archives.
pub(super) const PADDING: &[u8] = b"FB\x05\0ZZZZZ";

/// Makes the part that torch.save writes up to the storages.
pub(super) fn torch_begun(pickle: &[u8]) -> Zip {
    let mut zip = Zip::default();
    zip.add("step/data.pkl", PADDING, pickle);
    zip.add("step/byteorder", PADDING, b"little");
    zip
}

/// Adds the part that torch.save writes at the end, even after an exception.
pub(super) fn torch_ended(mut zip: Zip) -> Vec<u8> {
    zip.add("step/version", PADDING, b"3\n");
    zip.add("step/.data/serialization_id", PADDING, b"0123456789");
    zip.end()
}

pub(super) fn torch(storages: &[(u64, usize)]) -> Vec<u8> {
    let mut zip = torch_begun(&pickle(storages));
    for (key, bytes) in storages {
        zip.add(&format!("step/data/{key}"), PADDING, &vec![7; *bytes]);
    }
    torch_ended(zip)
}

pub(super) fn legacy(storages: &[(u64, usize)]) -> Vec<u8> {
    let keys: Vec<_> = storages.iter().map(|(key, _)| text(&key.to_string())).collect();
    let mut bytes = [
        &b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."[..],
        b"\x80\x02M\xe9\x03.",
        b"\x80\x02}q\0.",
        &pickle(storages),
        &[b"\x80\x02](", &keys.concat()[..], b"e."].concat(),
    ]
    .concat();
    for (_, length) in storages {
        bytes.extend((*length as u64 / 4).to_le_bytes());
        bytes.extend(vec![7; *length]);
    }
    bytes
}

pub(super) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; data]].concat()
}

pub(super) fn npy(descr: &str, shape: &str, data: usize) -> Vec<u8> {
    let mut header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}");
    while !(10 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    [&b"\x93NUMPY\x01\0"[..], &length, header.as_bytes(), &vec![7; data]].concat()
}

/// Makes a superblock of version 0 for a file of this length.
pub(super) fn hdf5_old(length: usize) -> Vec<u8> {
    let mut bytes = [&b"\x89HDF\r\n\x1a\n"[..], &[0, 0, 0, 0, 0, 8, 8, 0, 4, 0, 16, 0, 0, 0, 0, 0]].concat();
    for address in [0, u64::MAX, length as u64, u64::MAX] {
        bytes.extend(address.to_le_bytes());
    }
    bytes.resize(length, 7);
    bytes
}

/// Makes a superblock of version 3 with a right checksum.
pub(super) fn hdf5_new(length: usize, flags: u8) -> Vec<u8> {
    let mut bytes = [&b"\x89HDF\r\n\x1a\n"[..], &[3, 8, 8, flags]].concat();
    for address in [0, u64::MAX, length as u64, 48] {
        bytes.extend(address.to_le_bytes());
    }
    let sum = crate::hdf5::checksum(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes.resize(length, 7);
    bytes
}

fn gguf_text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Makes two tensors, one of them of blocks, after metadata of each shape.
pub(super) fn gguf() -> Vec<u8> {
    let number = |value: u32| value.to_le_bytes().to_vec();
    let words = [number(8), 2_u64.to_le_bytes().to_vec(), gguf_text("a"), gguf_text("b")].concat();
    let ids = [number(5), 3_u64.to_le_bytes().to_vec(), vec![0; 12]].concat();
    let tensor = |name: &str, sides: &[u64], kind: u32, offset: u64| {
        let sides = [
            number(u32::try_from(sides.len()).unwrap()),
            sides.iter().flat_map(|side| side.to_le_bytes()).collect(),
        ];
        [gguf_text(name), sides.concat(), number(kind), offset.to_le_bytes().to_vec()].concat()
    };
    let mut bytes = [
        b"GGUF".to_vec(),
        number(3),
        2_u64.to_le_bytes().to_vec(),
        4_u64.to_le_bytes().to_vec(),
        [gguf_text("general.name"), number(8), gguf_text("m")].concat(),
        [gguf_text("general.alignment"), number(4), number(64)].concat(),
        [gguf_text("words"), number(9), words].concat(),
        [gguf_text("ids"), number(9), ids].concat(),
        // 8 × 4 bytes, then 64 items in blocks of 32 with 18 bytes.
        tensor("f", &[8], 0, 0),
        tensor("q", &[64], 2, 64),
    ]
    .concat();
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.resize(bytes.len() + 64 + 36, 7);
    bytes
}

/// Makes a header, and its member in blocks.
pub(super) fn tar_member(name: &str, kind: u8, data: &[u8]) -> Vec<u8> {
    let mut block = [0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    block[148..156].fill(b' ');
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut bytes = [&block[..], data].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

pub(super) fn tar() -> Vec<u8> {
    let members = [tar_member("a", b'0', &[7; 700]), tar_member("d", b'5', b""), tar_member("b", b'0', b"x")];
    [&members.concat()[..], &[0; 1024]].concat()
}
