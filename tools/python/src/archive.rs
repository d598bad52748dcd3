//! Where each byte of the archive lies that `torch.save` writes, and all bytes of it that are not the records' own.
//!
//! Owns: headers, padding, data descriptors, the directory, the checksum that stands in the archive's id. Does not own: the records'
//! bytes, files, threads. Everything is a function of names, sizes and checksums.
//!
//! The shape is that of `PyTorchStreamWriter`: stored members, the zip64 end record always, zip64 fields only where a number needs
//! them, an extra field `FB` that moves each record's bytes to a multiple of the alignment, checksums behind the bytes.

const LOCAL_HEADER: u32 = 0x0403_4b50;
const DESCRIPTOR: u32 = 0x0807_4b50;
const CENTRAL_HEADER: u32 = 0x0201_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;
const END: u32 = 0x0605_4b50;

/// A descriptor's identifier and checksum.
pub(crate) const START_BYTES: usize = 8;
const LOCAL_HEADER_BYTES: u64 = 30;
/// Identifier and length of an extra field.
const EXTRA_BYTES: u64 = 4;
/// Names are UTF-8.
const FLAG_UTF8: u16 = 1 << 11;
/// Sizes and the checksum follow the bytes.
const FLAG_DESCRIPTOR: u16 = 1 << 3;
/// A number from here on stands in a zip64 field.
const LARGE: u64 = u32::MAX as u64;
/// The padding's length is a 16-bit number, and so is that of all extra fields together.
pub(crate) const ALIGNMENT_MAX: u64 = 1 << 15;

/// A member of the archive.
#[derive(Debug)]
pub(crate) struct Record {
    /// With the archive's own name in front.
    name: String,
    pub(crate) size: u64,
    header_at: u64,
    pub(crate) data_at: u64,
    padding: u64,
    pub(crate) crc: u32,
    /// The number that stands where a descriptor has its checksum, if the record's own bytes begin as a descriptor does.
    mistaken: Option<u32>,
}

/// The records so far. Their order is that of the file.
#[derive(Debug)]
pub(crate) struct Layout {
    name: String,
    alignment: u64,
    records: Vec<Record>,
    /// Where the next record begins; after the last, where the directory does.
    end: u64,
}

impl Layout {
    pub(crate) fn new(name: String, alignment: u64) -> Result<Self, String> {
        if alignment == 0 || alignment > ALIGNMENT_MAX {
            return Err(format!("an alignment of {alignment} is not between 1 and {ALIGNMENT_MAX}"));
        }
        Ok(Self { name, alignment, records: vec![], end: 0 })
    }

    pub(crate) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(crate) fn set_crc(&mut self, index: usize, crc: u32) {
        self.records[index].crc = crc;
    }

    /// Takes a record's bytes, or the first [`START_BYTES`] of them.
    pub(crate) fn set_start(&mut self, index: usize, start: &[u8]) {
        let behind = start.strip_prefix(&DESCRIPTOR.to_le_bytes());
        self.records[index].mistaken =
            behind.and_then(<[u8]>::first_chunk).map(|crc| u32::from_le_bytes(*crc));
    }

    /// Adds a record behind the others. Returns its index.
    pub(crate) fn add(&mut self, name: &str, size: u64) -> Result<usize, String> {
        let name = format!("{}/{name}", self.name);
        if name.len() > usize::from(u16::MAX) {
            return Err(format!("a record's name has {} bytes, more than {}", name.len(), u16::MAX));
        }
        let header_at = self.end;
        let extra = zip64_bytes(size, header_at) + EXTRA_BYTES;
        let unpadded = header_at + LOCAL_HEADER_BYTES + name.len() as u64 + extra;
        let padding = unpadded.next_multiple_of(self.alignment) - unpadded;
        let data_at = unpadded + padding;
        let record = Record { name, size, header_at, data_at, padding, crc: 0, mistaken: None };
        self.end = data_at + size + record.descriptor_bytes();
        self.records.push(record);
        Ok(self.records.len() - 1)
    }

    /// Forgets all records from this one on.
    pub(crate) fn cut(&mut self, count: usize) {
        if let Some(first) = self.records.get(count) {
            self.end = first.header_at;
            self.records.truncate(count);
        }
    }

    /// The length of the whole file, were nothing added.
    pub(crate) fn total(&self) -> u64 {
        let directory =
            |record: &Record| 46 + record.name.len() as u64 + zip64_bytes(record.size, record.header_at);
        self.end + self.records.iter().map(directory).sum::<u64>() + 56 + 20 + 22
    }

    /// The number that torch's writer puts into the id: a hash of the checksums of all records that have bytes, in order.
    ///
    /// The writer finds the checksums in what it writes: it takes each write that begins as a descriptor does for one
    /// (`ostream_write_func` in `caffe2/serialize/inline_container.cc`), and a record's bytes are one write.
    pub(crate) fn combined(&self) -> u64 {
        let records = self.records.iter().filter(|record| record.size > 0);
        let found = records.flat_map(|record| record.mistaken.into_iter().chain([record.crc]));
        found.fold(0, |seed: u64, crc| {
            let mixed =
                u64::from(crc).wrapping_add(0x9e37_79b9).wrapping_add(seed << 6).wrapping_add(seed >> 2);
            seed ^ mixed
        })
    }

    /// The directory and the end records.
    pub(crate) fn directory(&self) -> Vec<u8> {
        let mut out = Bytes::default();
        for record in &self.records {
            record.central_header(&mut out);
        }
        let (count, size) = (self.records.len() as u64, out.0.len() as u64);
        out.u32(END_64)
            .u64(44)
            .u16(0x031e)
            .u16(45)
            .u32(0)
            .u32(0)
            .u64(count)
            .u64(count)
            .u64(size)
            .u64(self.end);
        out.u32(LOCATOR_64).u32(0).u64(self.end + size).u32(1);
        let short = u16::try_from(count).unwrap_or(u16::MAX);
        out.u32(END).u16(0).u16(0).u16(short).u16(short).small(size).small(self.end).u16(0);
        out.0
    }
}

impl Record {
    fn flags(&self) -> u16 {
        if self.size > 0 { FLAG_UTF8 | FLAG_DESCRIPTOR } else { FLAG_UTF8 }
    }

    fn descriptor_bytes(&self) -> u64 {
        match (self.size, zip64_bytes(self.size, self.header_at)) {
            (0, _) => 0,
            (_, 0) => 16,
            (_, _) => 24,
        }
    }

    /// The local header, before the record's bytes.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = Bytes::default();
        let extra = zip64_bytes(self.size, self.header_at) + EXTRA_BYTES + self.padding;
        out.u32(LOCAL_HEADER).u16(0).u16(self.flags()).u16(0).u32(0).u32(0).u32(0).u32(0);
        out.u16(length(self.name.len() as u64)).u16(length(extra)).bytes(self.name.as_bytes());
        // The writer does not know the stored size here.
        self.zip64(&mut out, 0);
        out.bytes(b"FB").u16(length(self.padding));
        out.0.resize(out.0.len() + usize::from(length(self.padding)), b'Z');
        out.0
    }

    /// The data descriptor, behind the record's bytes.
    pub(crate) fn descriptor(&self) -> Vec<u8> {
        let mut out = Bytes::default();
        match self.descriptor_bytes() {
            0 => {}
            16 => drop(out.u32(DESCRIPTOR).u32(self.crc).small(self.size).small(self.size)),
            _ => drop(out.u32(DESCRIPTOR).u32(self.crc).u64(self.size).u64(self.size)),
        }
        out.0
    }

    fn central_header(&self, out: &mut Bytes) {
        out.u32(CENTRAL_HEADER).u16(0).u16(0).u16(self.flags()).u16(0).u32(0).u32(self.crc);
        out.small(self.size).small(self.size).u16(length(self.name.len() as u64));
        out.u16(length(zip64_bytes(self.size, self.header_at)));
        out.u16(0).u16(0).u16(0).u32(0).small(self.header_at).bytes(self.name.as_bytes());
        self.zip64(out, self.size);
    }

    fn zip64(&self, out: &mut Bytes, stored: u64) {
        let bytes = zip64_bytes(self.size, self.header_at);
        if bytes > 0 {
            out.u16(1).u16(length(bytes - EXTRA_BYTES));
            if self.size >= LARGE {
                out.u64(self.size).u64(stored);
            }
            if self.header_at >= LARGE {
                out.u64(self.header_at);
            }
        }
    }
}

/// The length of a record's zip64 field, its own header included; 0 where no number needs one.
fn zip64_bytes(size: u64, header_at: u64) -> u64 {
    match (size >= LARGE, header_at >= LARGE) {
        (false, false) => 0,
        (false, true) => EXTRA_BYTES + 8,
        (true, false) => EXTRA_BYTES + 16,
        (true, true) => EXTRA_BYTES + 24,
    }
}

/// Lengths of names and extra fields, which [`Layout`] has bounded.
fn length(value: u64) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

/// Little-endian numbers, one after the other.
#[derive(Debug, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    /// As 32 bits, which all ones say stands in a zip64 field.
    fn small(&mut self, value: u64) -> &mut Self {
        self.u32(u32::try_from(value).unwrap_or(u32::MAX))
    }
}
