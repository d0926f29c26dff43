//! The declarations of `abi` against the real headers: a C program prints every offset, size and constant.

use std::fmt::Write as _;
use std::process::Command;

use doorbell_verbs::abi::{self, *};
use doorbell_verbs::efa::abi as efa;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Constants as C names them.
const CONSTANTS: &[(&str, i64)] = &[
    ("IBV_WR_RDMA_WRITE", wr_opcode::WRITE as i64),
    ("IBV_WR_RDMA_WRITE_WITH_IMM", wr_opcode::WRITE_IMM as i64),
    ("IBV_WR_SEND", wr_opcode::SEND as i64),
    ("IBV_WR_SEND_WITH_IMM", wr_opcode::SEND_IMM as i64),
    ("IBV_WR_RDMA_READ", wr_opcode::READ as i64),
    ("IBV_WR_ATOMIC_CMP_AND_SWP", wr_opcode::COMPARE_SWAP as i64),
    ("IBV_WR_ATOMIC_FETCH_AND_ADD", wr_opcode::FETCH_ADD as i64),
    ("IBV_SEND_FENCE", send_flags::FENCE as i64),
    ("IBV_SEND_SIGNALED", send_flags::SIGNALED as i64),
    ("IBV_SEND_SOLICITED", send_flags::SOLICITED as i64),
    ("IBV_SEND_INLINE", send_flags::INLINE as i64),
    ("IBV_WC_LOC_LEN_ERR", wc_status::LOC_LEN_ERR as i64),
    ("IBV_WC_LOC_QP_OP_ERR", wc_status::LOC_QP_OP_ERR as i64),
    ("IBV_WC_LOC_EEC_OP_ERR", wc_status::LOC_EEC_OP_ERR as i64),
    ("IBV_WC_LOC_PROT_ERR", wc_status::LOC_PROT_ERR as i64),
    ("IBV_WC_WR_FLUSH_ERR", wc_status::WR_FLUSH_ERR as i64),
    ("IBV_WC_MW_BIND_ERR", wc_status::MW_BIND_ERR as i64),
    ("IBV_WC_BAD_RESP_ERR", wc_status::BAD_RESP_ERR as i64),
    ("IBV_WC_LOC_ACCESS_ERR", wc_status::LOC_ACCESS_ERR as i64),
    ("IBV_WC_REM_INV_REQ_ERR", wc_status::REM_INV_REQ_ERR as i64),
    ("IBV_WC_REM_ACCESS_ERR", wc_status::REM_ACCESS_ERR as i64),
    ("IBV_WC_REM_OP_ERR", wc_status::REM_OP_ERR as i64),
    ("IBV_WC_RETRY_EXC_ERR", wc_status::RETRY_EXC_ERR as i64),
    (
        "IBV_WC_RNR_RETRY_EXC_ERR",
        wc_status::RNR_RETRY_EXC_ERR as i64,
    ),
    (
        "IBV_WC_REM_INV_RD_REQ_ERR",
        wc_status::REM_INV_RD_REQ_ERR as i64,
    ),
    ("IBV_WC_REM_ABORT_ERR", wc_status::REM_ABORT_ERR as i64),
    ("IBV_WC_FATAL_ERR", wc_status::FATAL_ERR as i64),
    (
        "IBV_WC_RESP_TIMEOUT_ERR",
        wc_status::RESP_TIMEOUT_ERR as i64,
    ),
    ("IBV_WC_GENERAL_ERR", wc_status::GENERAL_ERR as i64),
    ("IBV_WC_RECV", wc_opcode::RECV as i64),
    (
        "IBV_WC_RECV_RDMA_WITH_IMM",
        wc_opcode::RECV_RDMA_WITH_IMM as i64,
    ),
    ("IBV_WC_RDMA_READ", wc_opcode::RDMA_READ as i64),
    ("IBV_WC_FETCH_ADD", wc_opcode::FETCH_ADD as i64),
    ("IBV_WC_WITH_IMM", wc_flags::WITH_IMM as i64),
    ("IBV_QPS_INIT", qp_state::INIT as i64),
    ("IBV_QPS_RTR", qp_state::RTR as i64),
    ("IBV_QPS_RTS", qp_state::RTS as i64),
    ("IBV_QPS_SQE", qp_state::SQE as i64),
    ("IBV_QPS_ERR", qp_state::ERR as i64),
    ("IBV_QPT_RC", qp_type::RC as i64),
    ("IBV_QPT_DRIVER", qp_type::DRIVER as i64),
    ("IBV_QP_STATE", qp_mask::STATE as i64),
    ("IBV_QP_ACCESS_FLAGS", qp_mask::ACCESS_FLAGS as i64),
    ("IBV_QP_PKEY_INDEX", qp_mask::PKEY_INDEX as i64),
    ("IBV_QP_PORT", qp_mask::PORT as i64),
    ("IBV_QP_QKEY", qp_mask::QKEY as i64),
    ("IBV_QP_AV", qp_mask::AV as i64),
    ("IBV_QP_PATH_MTU", qp_mask::PATH_MTU as i64),
    ("IBV_QP_TIMEOUT", qp_mask::TIMEOUT as i64),
    ("IBV_QP_RETRY_CNT", qp_mask::RETRY_CNT as i64),
    ("IBV_QP_RNR_RETRY", qp_mask::RNR_RETRY as i64),
    ("IBV_QP_RQ_PSN", qp_mask::RQ_PSN as i64),
    ("IBV_QP_MAX_QP_RD_ATOMIC", qp_mask::MAX_QP_RD_ATOMIC as i64),
    ("IBV_QP_MIN_RNR_TIMER", qp_mask::MIN_RNR_TIMER as i64),
    ("IBV_QP_SQ_PSN", qp_mask::SQ_PSN as i64),
    (
        "IBV_QP_MAX_DEST_RD_ATOMIC",
        qp_mask::MAX_DEST_RD_ATOMIC as i64,
    ),
    ("IBV_QP_DEST_QPN", qp_mask::DEST_QPN as i64),
    ("IBV_QP_INIT_ATTR_PD", init_mask::PD as i64),
    (
        "IBV_QP_INIT_ATTR_SEND_OPS_FLAGS",
        init_mask::SEND_OPS_FLAGS as i64,
    ),
    ("IBV_QP_EX_WITH_RDMA_WRITE", send_ops::RDMA_WRITE as i64),
    (
        "IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM",
        send_ops::RDMA_WRITE_WITH_IMM as i64,
    ),
    ("IBV_QP_EX_WITH_SEND", send_ops::SEND as i64),
    (
        "IBV_QP_EX_WITH_SEND_WITH_IMM",
        send_ops::SEND_WITH_IMM as i64,
    ),
    ("IBV_QP_EX_WITH_RDMA_READ", send_ops::RDMA_READ as i64),
    (
        "IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP",
        send_ops::ATOMIC_CMP_AND_SWP as i64,
    ),
    (
        "IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD",
        send_ops::ATOMIC_FETCH_AND_ADD as i64,
    ),
    ("IBV_ACCESS_LOCAL_WRITE", access::LOCAL_WRITE as i64),
    ("IBV_ACCESS_REMOTE_WRITE", access::REMOTE_WRITE as i64),
    ("IBV_ACCESS_REMOTE_READ", access::REMOTE_READ as i64),
    ("IBV_ACCESS_REMOTE_ATOMIC", access::REMOTE_ATOMIC as i64),
    ("IBV_PORT_DOWN", port_state::DOWN as i64),
    ("IBV_PORT_ACTIVE", port_state::ACTIVE as i64),
    ("IBV_LINK_LAYER_INFINIBAND", link_layer::INFINIBAND as i64),
    ("IBV_LINK_LAYER_ETHERNET", link_layer::ETHERNET as i64),
    ("IBV_GID_TYPE_IB", gid_type::IB as i64),
    ("IBV_GID_TYPE_ROCE_V1", gid_type::ROCE_V1 as i64),
    ("IBV_GID_TYPE_ROCE_V2", gid_type::ROCE_V2 as i64),
    ("IBV_ATOMIC_NONE", atomic_cap::NONE as i64),
    ("IBV_EVENT_CQ_ERR", event_type::CQ_ERR as i64),
    ("IBV_EVENT_QP_FATAL", event_type::QP_FATAL as i64),
    ("IBV_EVENT_QP_REQ_ERR", event_type::QP_REQ_ERR as i64),
    ("IBV_EVENT_QP_ACCESS_ERR", event_type::QP_ACCESS_ERR as i64),
    ("IBV_EVENT_DEVICE_FATAL", event_type::DEVICE_FATAL as i64),
    ("IBV_EVENT_PORT_ACTIVE", event_type::PORT_ACTIVE as i64),
    ("IBV_EVENT_PORT_ERR", event_type::PORT_ERR as i64),
    ("IBV_NODE_CA", node_type::CA as i64),
    ("IBV_MTU_4096", 5),
];

/// A C program that includes `header` says what each expression is; they are to be these numbers.
fn compare(header: &str, wanted: &[(String, i64)]) {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let mut c = format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include <{header}>\nint main(void) {{\n"
    );
    for (what, _) in wanted {
        writeln!(c, "printf(\"%lld\\n\", (long long)({what}));").expect("text");
    }
    c.push_str("return 0;\n}\n");
    std::fs::write(&source, c).expect("the program is written");
    let built = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .expect("a C compiler");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let said = Command::new(&program).output().expect("it runs");
    let said = String::from_utf8(said.stdout).expect("numbers");
    let numbers: Vec<i64> = said.lines().map(|l| l.parse().expect("a number")).collect();
    assert_eq!(numbers.len(), wanted.len());
    for ((what, ours), theirs) in wanted.iter().zip(numbers) {
        assert_eq!(*ours, theirs, "{what}");
    }
}

#[test]
#[ignore = "needs libibverbs-dev and a C compiler"]
fn peer_headers_agree_with_every_number() {
    assert!(std::path::Path::new(HEADER).exists(), "no {HEADER}");
    let mut wanted = Vec::new();
    for (structure, field, offset) in abi::LAYOUT.iter().chain(abi::FIELDS) {
        let what = match *field {
            "" => format!("sizeof(struct {structure})"),
            field => format!("offsetof(struct {structure}, {field})"),
        };
        wanted.push((what, *offset as i64));
    }
    let back = |field| {
        format!("offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {field})")
    };
    let at = core::mem::offset_of!(ExtendedContext, context);
    let create = core::mem::offset_of!(ExtendedContext, create_qp_ex);
    let size = core::mem::offset_of!(ExtendedContext, size);
    wanted.push((back("create_qp_ex"), (at - create) as i64));
    wanted.push((back("sz"), (at - size) as i64));
    // Members of unions, relative to the union.
    let union = |field: &str| {
        format!("offsetof(struct ibv_send_wr, {field}) - offsetof(struct ibv_send_wr, wr)")
    };
    for (field, offset) in [
        ("wr.rdma.remote_addr", 0),
        ("wr.rdma.rkey", 8),
        ("wr.atomic.remote_addr", 0),
        ("wr.atomic.compare_add", 8),
        ("wr.atomic.swap", 16),
        ("wr.atomic.rkey", 24),
    ] {
        wanted.push((union(field), offset));
    }
    let constants = CONSTANTS.iter();
    wanted.extend(constants.map(|(name, value)| ((*name).to_owned(), *value)));
    assert!(wanted.len() > 200, "only {} numbers", wanted.len());
    compare("infiniband/verbs.h", &wanted);
}

#[test]
#[ignore = "needs libibverbs-dev and a C compiler"]
fn peer_headers_of_efa_agree_with_every_number() {
    const HEADER: &str = "/usr/include/infiniband/efadv.h";
    let text = std::fs::read_to_string(HEADER).expect(HEADER);
    let mut wanted = Vec::new();
    for (structure, field, offset) in efa::FIELDS {
        wanted.push((
            format!("offsetof(struct {structure}, {field})"),
            *offset as i64,
        ));
    }
    // What is passed has the size of the oldest release, or more.
    let device = size_of::<efa::RawEfaAttr>() as i64;
    wanted.push(("sizeof(struct efadv_device_attr)".to_owned(), device));
    let init = size_of::<efa::RawEfaQpInit>() as i64;
    let fits = format!("sizeof(struct efadv_qp_init_attr) >= {init}");
    wanted.push((fits, 1));
    for (name, value) in [
        ("EFADV_QP_DRIVER_TYPE_SRD", efa::DRIVER_TYPE_SRD),
        ("EFADV_DEVICE_ATTR_CAPS_RDMA_READ", efa::caps::RDMA_READ),
        ("EFADV_DEVICE_ATTR_CAPS_RNR_RETRY", efa::caps::RNR_RETRY),
        ("EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE", efa::caps::RDMA_WRITE),
    ] {
        // Remote writes came with rdma-core 46; older headers do not know the name.
        if text.contains(name) || name != "EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE" {
            wanted.push((name.to_owned(), i64::from(value)));
        }
    }
    compare("infiniband/efadv.h", &wanted);
}

#[test]
#[ignore = "needs libibverbs.so.1"]
fn peer_library_loads_and_lists_devices() {
    let verbs = doorbell_verbs::Verbs::load_from(doorbell_verbs::LIBRARY).expect("rdma-core");
    assert!(verbs.api().reg_mr_iova2.is_some() && verbs.api().qp_to_qp_ex.is_some());
    assert_eq!(
        verbs.status_words(wc_status::RETRY_EXC_ERR),
        "transport retry counter exceeded"
    );
    let found: Vec<String> = verbs
        .devices()
        .expect("a list")
        .into_iter()
        .map(|d| d.name)
        .collect();
    let error = doorbell_verbs::Context::open(&verbs, "no such device").expect_err("no device");
    assert!(error.to_string().contains("no such device"), "{error}");
    assert!(!found.contains(&"no such device".to_owned()));
}

#[test]
fn a_library_that_is_not_there_is_named_with_its_package() {
    let error = doorbell_verbs::Verbs::load_from("/no/such/libibverbs.so.1").expect_err("none");
    let text = error.to_string();
    assert!(
        text.contains("/no/such/libibverbs.so.1") && text.contains("rdma-core"),
        "{text}"
    );
}

#[test]
fn another_library_is_refused_by_the_function_that_it_lacks() {
    let error = doorbell_verbs::Verbs::load_from("libc.so.6").expect_err("no verbs in there");
    assert!(error.to_string().contains("ibv_get_device_list"), "{error}");
}

#[test]
#[ignore = "needs libefa.so.1"]
fn peer_libefa_has_what_is_called() {
    // SAFETY: rdma-core's driver, whose constructor registers it and nothing else.
    let library = unsafe { libloading::Library::new(doorbell_verbs::efa::LIBRARY) };
    let library = library.expect("libefa of rdma-core");
    for name in ["efadv_query_device", "efadv_create_qp_ex"] {
        // SAFETY: it is only looked for.
        let found = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        assert!(found.is_ok(), "{name}");
    }
}
