//! Every byte of a WQE, a CQE, a doorbell and its record by name.
//!
//! The bytes are those that were read back from the queue; what they say comes from `doorbell-wire`, which the GPU's code
//! and the engine use as well.

use std::ops::Range;

use doorbell::{Syndrome, Vendor};
use doorbell_wire::cqe::{Cqe, CqeTail, ErrorCqe, Kind};
use doorbell_wire::{Chunk, Ctrl, Fence, Local, Opcode, Remote, flags, seg};

/// Some bytes that mean one thing.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) bytes: Range<usize>,
    pub(super) name: &'static str,
    pub(super) says: String,
    /// This is the value that was made wrong.
    pub(super) wrong: bool,
}

/// Sixteen bytes (or more) that belong together.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) bytes: Range<usize>,
    pub(super) name: &'static str,
    pub(super) fields: Vec<Field>,
}

fn field(bytes: Range<usize>, name: &'static str, says: impl Into<String>) -> Field {
    Field {
        bytes,
        name,
        says: says.into(),
        wrong: false,
    }
}

/// 64 bytes as the pieces that `doorbell-wire` reads.
pub(super) fn chunks(bytes: &[u8; 64]) -> [Chunk; 4] {
    let (pieces, _) = bytes.as_chunks::<16>();
    std::array::from_fn(|i| Chunk::from_bytes(&pieces[i]))
}

/// The segments of a one-slot WQE. What lies behind its end is left out.
pub(super) fn wqe(bytes: &[u8; 64], name: &dyn Fn(u32) -> String) -> Vec<Segment> {
    let chunks = chunks(bytes);
    let ctrl = Ctrl::parse(chunks[0]);
    let mut segments = vec![control(ctrl)];
    let ds = usize::from(ctrl.ds).min(chunks.len());
    let mut next = 1;
    let opcode = ctrl.opcode().ok();
    let has_remote = matches!(
        opcode,
        Some(
            Opcode::RdmaWrite
                | Opcode::RdmaWriteImm
                | Opcode::RdmaRead
                | Opcode::FetchAdd
                | Opcode::CompareSwap
        )
    );
    if has_remote && next < ds {
        segments.push(remote(16 * next, Remote::parse(chunks[next]), name));
        next += 1;
    }
    if matches!(opcode, Some(Opcode::FetchAdd | Opcode::CompareSwap)) && next < ds {
        segments.push(atomic(
            16 * next,
            chunks[next],
            opcode == Some(Opcode::FetchAdd),
        ));
        next += 1;
    }
    while next < ds {
        let (segment, taken) = data(16 * next, &chunks[next..ds], opcode, name);
        segments.push(segment);
        next += taken;
    }
    segments
}

fn control(ctrl: Ctrl) -> Segment {
    let opcode = match ctrl.opcode() {
        Ok(opcode) => opcode.name().to_owned(),
        Err(unknown) => unknown.to_string(),
    };
    let completion = match ctrl.fm_ce_se & flags::CQ_MASK {
        flags::CQ_ERROR_ONLY => "CQE only if it fails",
        flags::CQ_FIRST_ERROR => "CQE for a first error",
        _ => "CQE when done",
    };
    let fence = match Fence::from_bits(ctrl.fm_ce_se) {
        Some(Fence::None) => "no fence",
        Some(_) => "fenced",
        None => "a reserved fence",
    };
    let imm = if matches!(ctrl.opcode, 0x09 | 0x0b) {
        format!("{:#010x}", ctrl.imm)
    } else {
        "not of this opcode".to_owned()
    };
    Segment {
        bytes: 0..16,
        name: "control segment",
        fields: vec![
            field(0..1, "opmod", "used by masked atomics only"),
            field(
                1..3,
                "index",
                format!("WQE {}: producer index mod 2^16", ctrl.idx),
            ),
            field(3..4, "opcode", opcode),
            field(4..7, "QP number", format!("{:#08x}, this queue", ctrl.qpn)),
            field(7..8, "ds", format!("{} x 16 bytes in all", ctrl.ds)),
            field(8..11, "reserved", "signature and stream; ignored"),
            field(11..12, "fm_ce_se", format!("{completion}; {fence}")),
            field(12..16, "immediate", imm),
        ],
    }
}

fn remote(at: usize, remote: Remote, name: &dyn Fn(u32) -> String) -> Segment {
    Segment {
        bytes: at..at + 16,
        name: "remote address segment",
        fields: vec![
            field(at..at + 8, "address", format!("{:#x}", remote.addr)),
            field(at + 8..at + 12, "rkey", name(remote.key.0)),
            field(at + 12..at + 16, "reserved", "ignored"),
        ],
    }
}

fn atomic(at: usize, chunk: Chunk, add: bool) -> Segment {
    let (first, second) = if add {
        (
            field(at..at + 8, "add", format!("{}", chunk.be64(0))),
            field(at + 8..at + 16, "compare", "not of this opcode"),
        )
    } else {
        (
            field(at..at + 8, "swap", format!("{:#x}", chunk.be64(0))),
            field(at + 8..at + 16, "compare", format!("{:#x}", chunk.be64(1))),
        )
    };
    Segment {
        bytes: at..at + 16,
        name: "atomic segment",
        fields: vec![first, second],
    }
}

/// A data segment, registered or inline; how many chunks it takes.
fn data(
    at: usize,
    chunks: &[Chunk],
    opcode: Option<Opcode>,
    name: &dyn Fn(u32) -> String,
) -> (Segment, usize) {
    let head = chunks[0];
    if seg::is_inline(head) {
        let len = head.be32(0) & !seg::INLINE;
        let taken = (seg::inline_ds(len) as usize).clamp(1, chunks.len());
        let end = (at + 4 + len as usize).min(at + 16 * taken);
        let fields = vec![
            field(
                at..at + 4,
                "inline",
                format!("bit 31: {len} bytes follow in here"),
            ),
            field(at + 4..end, "payload", "the bytes themselves"),
        ];
        let segment = Segment {
            bytes: at..at + 16 * taken,
            name: "inline data",
            fields,
        };
        return (segment, taken);
    }
    let local = Local::parse(head);
    let purpose = match opcode {
        Some(Opcode::RdmaRead) => "where the bytes go",
        Some(Opcode::FetchAdd | Opcode::CompareSwap) => "where the old value goes",
        _ => "where the bytes are",
    };
    let segment = Segment {
        bytes: at..at + 16,
        name: "data segment",
        fields: vec![
            field(at..at + 4, "length", format!("{} bytes", local.len)),
            field(at + 4..at + 8, "lkey", name(local.key.0)),
            field(
                at + 8..at + 16,
                "address",
                format!("{:#x}: {purpose}", local.addr),
            ),
        ],
    };
    (segment, 1)
}

/// The record: big-endian, sixteen bits of index.
pub(super) fn record(bytes: [u8; 4]) -> Field {
    let pi = doorbell_wire::db::parse_record(u32::from_ne_bytes(bytes));
    field(0..4, "record", format!("producer index {pi}, mod 2^16"))
}

/// The doorbell word: index and QP number.
pub(super) fn doorbell(bytes: [u8; 8]) -> Field {
    let (pi, qpn) = doorbell_wire::db::parse(u64::from_ne_bytes(bytes));
    field(
        0..8,
        "doorbell",
        format!("index {pi} << 8, QP {:#08x} << 8", qpn.get()),
    )
}

/// What a CQE says.
pub(super) enum Seen {
    Nothing,
    Done,
    Failed(ErrorCqe),
}

/// What the 64 bytes of a CQE say as a whole.
pub(super) fn seen(bytes: &[u8; 64]) -> Seen {
    let chunks = chunks(bytes);
    match ErrorCqe::parse(&chunks) {
        Some(error) => Seen::Failed(error),
        None if CqeTail::of(chunks[3]).is_invalid() => Seen::Nothing,
        None => Seen::Done,
    }
}

/// The segments of a CQE: the first 32 bytes and the rest.
pub(super) fn cqe(bytes: &[u8; 64]) -> Vec<Segment> {
    let chunks = chunks(bytes);
    let cqe = Cqe::parse(&chunks);
    let receive = matches!(
        cqe.tail.kind(),
        Some(
            Kind::ResponderWriteImm
                | Kind::ResponderSend
                | Kind::ResponderSendImm
                | Kind::ResponderSendInval
        )
    );
    let opcode = match Opcode::try_from(cqe.opcode) {
        _ if receive => "none: a receive",
        Ok(opcode) => opcode.name(),
        Err(_) => "unknown",
    };
    let index = match receive {
        true => format!("receive {}", cqe.tail.wqe_counter()),
        false => format!("WQE {}", cqe.tail.wqe_counter()),
    };
    let count = match cqe.byte_cnt {
        0 => "not told for this opcode".to_owned(),
        n => n.to_string(),
    };
    let mut fields = vec![field(32..44, "(unused)", "no immediate")];
    match ErrorCqe::parse(&chunks) {
        Some(error) => fields.extend([
            field(44..54, "(unused)", "not written in errors"),
            field(
                54..55,
                "vendor",
                named(error.vendor.name(), error.vendor == Vendor::NONE),
            ),
            field(
                55..56,
                "syndrome",
                named(error.syndrome.name(), error.syndrome == Syndrome::NONE),
            ),
        ]),
        None => fields.extend([
            field(44..48, "byte count", count),
            field(48..56, "(unused)", "a timestamp on hardware"),
        ]),
    }
    let kind = match cqe.tail.kind() {
        Some(Kind::Requester) => "0: a send completed",
        Some(Kind::RequesterError) => "13: a send failed",
        Some(Kind::ResponderError) => "14: a receive failed",
        Some(Kind::ResponderSend) => "2: a SEND arrived",
        Some(Kind::Invalid) => "15: nothing yet",
        _ => "another kind",
    };
    fields.extend([
        field(56..57, "opcode", format!("{:#04x} {opcode}", cqe.opcode)),
        field(57..60, "QP number", format!("{:#08x}", cqe.qpn.get())),
        field(60..62, "index", index),
        field(62..63, "signature", "not used"),
        field(
            63..64,
            "op_own",
            format!("kind {kind}; owner {}", cqe.tail.owner()),
        ),
    ]);
    vec![
        Segment {
            bytes: 0..32,
            name: "not used by sends",
            fields: Vec::new(),
        },
        Segment {
            bytes: 32..64,
            name: "CQE",
            fields,
        },
    ]
}

fn named(name: Option<&str>, none: bool) -> String {
    match name {
        _ if none => "nothing more to say".to_owned(),
        Some(name) => name.to_owned(),
        None => "a code that nobody knows".to_owned(),
    }
}
