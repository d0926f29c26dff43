//! Golden vectors: bytes derived by hand from the layouts, each with its source.
//!
//! Every WQE is emitted into a buffer of 0xa5, so a byte that should have been written and was not, or the reverse, shows.
//! Sources: [ctrl] [raddr] [data] [inl] [atomic] are rdma-core's `mlx5_wqe_*_seg` in mlx5dv.h; [wait] and [ext] the wait and extended
//! atomic segments of NVIDIA's GPUNetIO device headers and of UCX (`uct_ib_mlx5_atomic_masked_*_seg`); [cqe] `mlx5_cqe64` and `mlx5_err_cqe`.

use doorbell_wire::cqe::{self, Cqe, CqeTail, ErrorCqe, Kind};
use doorbell_wire::{
    Chunk, Cqn, Fence, Key, Local, Opcode, Payload, Qpn, Remote, Request, Syndrome, Vendor, Width,
    Wqe, db, seg,
};

const QPN: Qpn = Qpn::truncate(0x12_3456);
const REMOTE: Remote = Remote {
    addr: 0x1122_3344_5566_7788,
    key: Key(0x99aa_bbcc),
};
const LOCAL: Local = Local {
    addr: 0x0123_4567_89ab_cdef,
    key: Key(0xddee_ff00),
    len: 0x1000,
};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    assert!(digits.len().is_multiple_of(2));
    digits
        .chunks(2)
        .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}

fn chunks(bytes: &[u8]) -> Vec<Chunk> {
    assert!(bytes.len().is_multiple_of(16));
    bytes
        .chunks(16)
        .map(|b| Chunk::from_bytes(b.try_into().unwrap()))
        .collect()
}

/// Emits at index 0xabcd into 0xa5s and compares all of the buffer.
#[track_caller]
fn golden(wqe: Wqe, want: &str) -> Vec<u8> {
    let want = hex(want);
    assert_eq!(usize::from(wqe.ds()) * 16, want.len(), "ds");
    let mut ring = [0xa5u8; 192];
    let at = 16;
    for (i, chunk) in wqe
        .emit(0xabcd, QPN)
        .iter()
        .take(wqe.ds().into())
        .enumerate()
    {
        ring[at + 16 * i..at + 16 * (i + 1)].copy_from_slice(&chunk.to_bytes());
    }
    let mut expected = [0xa5u8; 192];
    expected[at..at + want.len()].copy_from_slice(&want);
    assert_eq!(ring, expected);
    assert_eq!(wqe.slots(), (want.len() as u16).div_ceil(64), "slots");
    want
}

#[test]
fn nop() {
    // [ctrl] be32 opmod<<24 | idx<<8 | opcode; be32 qpn<<8 | ds; signature, 2 reserved, fm_ce_se = CQ_UPDATE (2 << 2); imm.
    golden(
        Wqe::nop().signalled(true),
        "00abcd00 12345601 00000008 00000000",
    );
    golden(Wqe::nop(), "00abcd00 12345601 00000000 00000000");
}

#[test]
fn flag_byte() {
    // mlx5dv.h: MLX5_WQE_CTRL_FENCE = 4 << 5, INITIATOR_SMALL_FENCE = 1 << 5, SOLICITED = 1 << 1.
    let nop = Wqe::nop().signalled(true);
    golden(
        nop.fence(Fence::Full).solicited(true),
        "00abcd00 12345601 0000008a 00000000",
    );
    golden(
        nop.fence(Fence::Small),
        "00abcd00 12345601 00000028 00000000",
    );
    golden(
        nop.fence(Fence::Strong).fence(Fence::Reads),
        "00abcd00 12345601 00000048 00000000",
    );
    golden(
        nop.solicited(true).solicited(false).signalled(false),
        "00abcd00 12345601 00000000 00000000",
    );
}

#[test]
fn write() {
    // [ctrl] [raddr] be64 addr, be32 rkey, reserved [data] be32 len, be32 lkey, be64 addr.
    golden(
        Wqe::write(REMOTE, LOCAL).unwrap().signalled(true),
        "00abcd08 12345603 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         00001000 ddeeff00 01234567 89abcdef",
    );
    // Without payload the data segment is left out, as rdma-core does for a zero-length SGE.
    golden(
        Wqe::write(REMOTE, Local { len: 0, ..LOCAL }).unwrap(),
        "00abcd08 12345602 00000000 00000000
         11223344 55667788 99aabbcc 00000000",
    );
}

#[test]
fn write_imm() {
    golden(
        Wqe::write_imm(REMOTE, LOCAL, 0xcafe_babe)
            .unwrap()
            .signalled(true)
            .solicited(true),
        "00abcd09 12345603 0000000a cafebabe
         11223344 55667788 99aabbcc 00000000
         00001000 ddeeff00 01234567 89abcdef",
    );
}

#[test]
fn write_inline() {
    // [inl] be32 len | 1 << 31, then raw bytes; the segment is rounded up to 16.
    let bytes: Vec<u8> = (1..=92).collect();
    let head = "00abcd08 123456DS 00000000 00000000 11223344 55667788 99aabbcc 00000000";
    let cases = [
        (1, "03", "80000001 01000000 00000000 00000000"),
        (8, "03", "80000008 01020304 05060708 00000000"),
        (12, "03", "8000000c 01020304 05060708 090a0b0c"),
        (
            13,
            "04",
            "8000000d 01020304 05060708 090a0b0c 0d000000 00000000 00000000 00000000",
        ),
        (
            28,
            "04",
            "8000001c 01020304 05060708 090a0b0c 0d0e0f10 11121314 15161718 191a1b1c",
        ),
    ];
    for (len, ds, tail) in cases {
        golden(
            Wqe::write_inline(REMOTE, &bytes[..len]).unwrap(),
            &(head.replace("DS", ds) + tail),
        );
    }
    golden(
        Wqe::write_inline(REMOTE, &[]).unwrap(),
        &(head.replace("DS", "03") + "80000000 00000000 00000000 00000000"),
    );
    let mut most = hex(&(head.replace("DS", "08") + "8000005c"));
    most.extend(&bytes);
    let most: String = most.iter().map(|b| format!("{b:02x}")).collect();
    golden(Wqe::write_inline(REMOTE, &bytes).unwrap(), &most);
}

#[test]
fn inline_values() {
    // What putValue of NCCL's device code writes: the value in native (little-endian) order behind the header.
    let want = chunks(&hex(
        "80000008 08070605 04030201 00000000 80000004 78563412 00000000 00000000",
    ));
    assert_eq!(seg::inline8(0x0102_0304_0506_0708, 8), want[0]);
    assert_eq!(seg::inline8(0x1234_5678, 4), want[1]);
    assert_eq!(
        seg::inline_first(4, [0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0, 0, 0, 0, 0]),
        want[1]
    );
    assert_eq!(seg::inline_words(4, [0x1234_5678, 0, 0]), want[1]);
    for (len, ds) in [
        (0, 1),
        (1, 1),
        (12, 1),
        (13, 2),
        (28, 2),
        (29, 3),
        (u32::MAX, 0x1000_0001),
    ] {
        assert_eq!(seg::inline_ds(len), ds, "{len}");
    }
}

#[test]
fn read() {
    golden(
        Wqe::read(REMOTE, LOCAL).unwrap().signalled(true),
        "00abcd10 12345603 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         00001000 ddeeff00 01234567 89abcdef",
    );
}

#[test]
fn sends() {
    golden(
        Wqe::send(LOCAL).unwrap(),
        "00abcd0a 12345602 00000000 00000000
         00001000 ddeeff00 01234567 89abcdef",
    );
    golden(
        Wqe::send_imm(LOCAL, 0x0102_0304).unwrap(),
        "00abcd0b 12345602 00000000 01020304
         00001000 ddeeff00 01234567 89abcdef",
    );
    golden(
        Wqe::send(Local { len: 0, ..LOCAL }).unwrap(),
        "00abcd0a 12345601 00000000 00000000",
    );
    golden(
        Wqe::send_inline(&[0xfe, 0xed]).unwrap(),
        "00abcd0a 12345602 00000000 00000000
         80000002 feed0000 00000000 00000000",
    );
}

const AT: Remote = Remote {
    addr: 0x1122_3344_5566_7788,
    key: Key(0x99aa_bbcc),
};
const OLD8: Local = Local { len: 8, ..LOCAL };
const OLD4: Local = Local { len: 4, ..LOCAL };

#[test]
fn atomics() {
    // [atomic] be64 swap_add, be64 compare. For FETCH_ADD GPUNetIO repeats the operand in the unused half.
    golden(
        Wqe::fetch_add(AT, OLD8, 0x0102_0304_0506_0708)
            .unwrap()
            .signalled(true),
        "00abcd12 12345604 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         01020304 05060708 01020304 05060708
         00000008 ddeeff00 01234567 89abcdef",
    );
    golden(
        Wqe::compare_swap(AT, OLD8, 0xc0, 0x50)
            .unwrap()
            .signalled(true),
        "00abcd11 12345604 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         00000000 00000050 00000000 000000c0
         00000008 ddeeff00 01234567 89abcdef",
    );
}

#[test]
fn masked_atomics() {
    // [ext] opmod 8 | (log2(bytes) - 2) in byte 0; 4 B: add, boundary, reserved; 8 B: add, boundary.
    golden(
        Wqe::masked_fetch_add4(AT, OLD4, 0x0102_0304, 0x8000_0080)
            .unwrap()
            .signalled(true),
        "08abcd15 12345604 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         01020304 80000080 00000000 00000000
         00000004 ddeeff00 01234567 89abcdef",
    );
    golden(
        Wqe::masked_fetch_add8(AT, OLD8, 0x0102_0304_0506_0708, 0x8080)
            .unwrap()
            .signalled(true),
        "09abcd15 12345604 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         01020304 05060708 00000000 00008080
         00000008 ddeeff00 01234567 89abcdef",
    );
    // 4 B: swap, compare, swap_mask, compare_mask in one chunk.
    golden(
        Wqe::masked_compare_swap4(AT, OLD4, (0xc, 0xcc), (0x5, 0x55))
            .unwrap()
            .signalled(true),
        "08abcd14 12345604 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         00000005 0000000c 00000055 000000cc
         00000004 ddeeff00 01234567 89abcdef",
    );
    // 8 B: swap and compare, then their masks; the data segment is the first chunk of the second slot.
    golden(
        Wqe::masked_compare_swap8(AT, OLD8, (0xc, 0xcc), (0x5, 0x55))
            .unwrap()
            .signalled(true),
        "09abcd14 12345605 00000008 00000000
         11223344 55667788 99aabbcc 00000000
         00000000 00000005 00000000 0000000c
         00000000 00000055 00000000 000000cc
         00000008 ddeeff00 01234567 89abcdef",
    );
}

#[test]
fn wait_and_dump() {
    // [wait] 8 reserved bytes, be32 index, be32 cqn; opcode 0x0f (kernel MLX5_OPCODE_WAIT).
    golden(
        Wqe::wait(0xdead_beef, Cqn::truncate(0x65_4321)).signalled(true),
        "00abcd0f 12345602 00000008 00000000
         00000000 00000000 deadbeef 00654321",
    );
    // [data] with opcode 0x23 (kernel MLX5_OPCODE_DUMP).
    golden(
        Wqe::dump(Local { len: 1, ..LOCAL })
            .unwrap()
            .signalled(true),
        "00abcd23 12345602 00000008 00000000
         00000001 ddeeff00 01234567 89abcdef",
    );
}

#[test]
fn foreign_wqes_with_garbage_in_reserved_fields() {
    // NCCL's device code leaves bytes 8 to 10, imm, the reserved word of raddr and the first 8 bytes of wait uninitialised, and the chunks
    // behind the WQE hold an older one: all 0xa5 here.
    let garbage = "a5a5a5a5 a5a5a5a5 a5a5a5a5 a5a5a5a5";
    let head = |op: &str, ds: &str| format!("00abcd{op} 123456{ds} a5a5a508 a5a5a5a5");
    let raddr = "00000000 00000040 99aabbcc a5a5a5a5";
    let remote = Remote {
        addr: 0x40,
        key: Key(0x99aa_bbcc),
    };
    let data = "00000008 ddeeff00 00000000 00000010";
    let local = Local {
        addr: 0x10,
        key: Key(0xddee_ff00),
        len: 8,
    };

    let parse = |text: String| chunks(&hex(&(text + garbage)));
    let slots = parse(head("00", "01"));
    assert_eq!(Request::parse(&slots), Ok(Request::Nop));
    let slots = parse(head("08", "03") + raddr + data);
    let want = Request::Write {
        remote,
        local: Payload::Local(local),
        imm: None,
    };
    assert_eq!(Request::parse(&slots), Ok(want));
    let slots = parse(head("10", "03") + raddr + data);
    assert_eq!(
        Request::parse(&slots),
        Ok(Request::Read {
            remote,
            local: Payload::Local(local)
        })
    );
    let slots = parse(head("12", "04") + raddr + "00000000 00000007 00000000 00000007" + data);
    assert_eq!(
        Request::parse(&slots),
        Ok(Request::FetchAdd {
            remote,
            local,
            add: 7
        })
    );
    let slots = parse(head("0f", "02") + "a5a5a5a5 a5a5a5a5 00000009 00000123");
    assert_eq!(
        Request::parse(&slots),
        Ok(Request::Wait {
            index: 9,
            cqn: Cqn::truncate(0x123)
        })
    );
    let slots = parse(head("23", "02") + data);
    assert_eq!(Request::parse(&slots), Ok(Request::Dump { local }));
    // Masked 4-byte add: GPUNetIO leaves the last 8 bytes of the operands uninitialised.
    let slots = parse(
        format!("08{}", &head("15", "04")[2..])
            + raddr
            + "00000003 00000080 a5a5a5a5 a5a5a5a5"
            + data,
    );
    assert!(
        Request::parse(&slots).is_err(),
        "8 bytes of old value do not fit 4"
    );
    let data4 = "00000004 ddeeff00 00000000 00000010";
    let slots = parse(
        format!("08{}", &head("15", "04")[2..])
            + raddr
            + "00000003 00000080 a5a5a5a5 a5a5a5a5"
            + data4,
    );
    let local = Local { len: 4, ..local };
    let want = Request::MaskedFetchAdd {
        remote,
        local,
        width: Width::Four,
        add: 3,
        boundary: 0x80,
    };
    assert_eq!(Request::parse(&slots), Ok(want));
    // putValue of 4 bytes: what lies behind the value is the old slot.
    let slots = parse(head("08", "03") + raddr + "80000004 01020304 a5a5a5a5 a5a5a5a5");
    let Ok(Request::Write {
        local: Payload::Inline(inline),
        ..
    }) = Request::parse(&slots)
    else {
        panic!("{:?}", Request::parse(&slots));
    };
    assert_eq!(inline.bytes().collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn completions() {
    // [cqe] 32 bytes and srqn zero, be32 imm @36, be32 byte_cnt @44, 8 bytes of timestamp zero, be32 opcode<<24|qpn @56,
    // be16 counter @60, signature @62, kind<<4|owner @63.
    let zero = "00000000 00000000 00000000 00000000";
    let want = chunks(&hex(&format!(
        "{zero} {zero} 00000000 00000000 00000000 00001000 00000000 00000000 08123456 abcd0001"
    )));
    let ok = cqe::ok_chunks(QPN, Opcode::RdmaWrite as u8, 0xabcd, 1, 0x1000);
    assert_eq!(ok[..], want[..]);
    let back = Cqe::parse(&ok);
    assert_eq!(
        (back.qpn, back.opcode, back.byte_cnt, back.imm),
        (QPN, 8, 0x1000, 0)
    );
    assert_eq!(
        (back.tail.wqe_counter(), back.tail.kind(), back.tail.owner()),
        (0xabcd, Some(Kind::Requester), 1)
    );
    assert_eq!(ErrorCqe::parse(&ok), None);

    let want = chunks(&hex(&format!(
        "{zero} {zero} 00000000 cafebabe 00000000 00000020 00000000 00000000 00123456 00070010"
    )));
    assert_eq!(
        cqe::recv_chunks(Kind::ResponderWriteImm, QPN, 7, 0, 0x20, 0xcafe_babe)[..],
        want[..]
    );
}

#[test]
fn error_completions() {
    // [cqe] mlx5_err_cqe: vendor_err_synd @54, syndrome @55, s_wqe_opcode_qpn @56, wqe_counter @60, op_own @63.
    let zero = "00000000 00000000 00000000 00000000";
    let want = chunks(&hex(&format!(
        "{zero} {zero} {zero} 00000000 00008604 08123456 abcd00d1"
    )));
    let kind = Kind::RequesterError;
    let got = cqe::error_chunks(
        kind,
        QPN,
        0x08,
        0xabcd,
        1,
        Syndrome::LOCAL_PROT,
        Vendor::BAD_LKEY,
    );
    assert_eq!(got[..], want[..]);
    let bytes: Vec<u8> = got.iter().flat_map(|c| c.to_bytes()).collect();
    assert_eq!((bytes[54], bytes[55], bytes[63]), (0x86, 0x04, 0xd1));
    let error = ErrorCqe::parse(&got).unwrap();
    assert_eq!(
        (error.syndrome, error.vendor),
        (Syndrome::LOCAL_PROT, Vendor::BAD_LKEY)
    );
    assert_eq!(
        (error.qpn, error.opcode, error.tail.wqe_counter()),
        (QPN, 0x08, 0xabcd)
    );
}

#[test]
fn tails() {
    // What a poller's 32-bit load of bytes 60 to 63 gives.
    let tail = CqeTail::new(0x1234, Kind::RequesterError, 1);
    assert_eq!(tail.0.to_ne_bytes(), [0x12, 0x34, 0x00, 0xd1]);
    // NCCL initialises every op_own of a per-slot CQ to 0xf1; a collapsed CQE starts as 0xf0.
    assert_eq!(CqeTail::initial(1).op_own(), 0xf1);
    assert_eq!(CqeTail::initial(0).op_own(), 0xf0);
    // The owner bit flips with every lap: (index / entries) & 1.
    assert_eq!(
        [0, 1023, 1024, 2047, 2048].map(|i| cqe::owner(i, 10)),
        [0, 0, 1, 1, 0]
    );
    for byte in 0..=255u8 {
        let tail = CqeTail(u32::from(byte) << 24);
        assert_eq!(tail.kind(), Kind::from_code(byte >> 4));
        assert_eq!(tail.is_error(), tail.kind().is_some_and(Kind::is_error));
        assert_eq!(tail.is_invalid(), byte >= 0xf0);
        assert_eq!(tail.owner(), byte & 1);
        if let Some(kind) = tail.kind() {
            assert_eq!(cqe::op_own(kind, byte), byte & 0xf1);
        }
    }
}

#[test]
fn doorbells() {
    // {be32 pi<<8, be32 qpn<<8}: only 24 bits of the producer index fit.
    let word = db::doorbell_word(0x7_12ab_cdef, QPN);
    assert_eq!(
        word.to_ne_bytes(),
        [0xab, 0xcd, 0xef, 0x00, 0x12, 0x34, 0x56, 0x00]
    );
    assert_eq!(db::parse(word), (0xab_cdef, QPN));
    // A real BlueFlame write starts with the control segment itself: opcode and ds do not disturb.
    let ctrl = seg::ctrl(0xabcd, Opcode::RdmaWrite, 0, QPN, 3, 8, 0);
    assert_eq!(db::parse(ctrl.0[0]), (0x00_abcd, QPN));
    // The record holds 16 bits.
    assert_eq!(db::record(0x12ab_cdef).to_ne_bytes(), [0, 0, 0xcd, 0xef]);
    assert_eq!(db::parse_record(db::record(0x12ab_cdef)), 0xcdef);
}
